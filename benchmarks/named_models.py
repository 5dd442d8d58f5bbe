"""Writes timm_knapsack/models/channel_configs/*.json and model_cards/*.md: the named pruned models and their cards.

    python benchmarks/named_models.py            # write both
    python benchmarks/named_models.py --check    # exit 1 if a file is not what this would write

The widths of the paper's ResNet-50 are the bar chart of its supplement ("Pruning ratio and pruned output channels for
ResNet 50"; the first series is what stays). The other five are the shapes that timm ships in timm/models/_pruned.
"""

import argparse
import sys
from pathlib import Path

import timm_knapsack  # noqa: F401  (first: it lets timm be imported beside any torchvision)
from timm_knapsack.slim.channel_config import ChannelConfig

REPOSITORY = Path(__file__).resolve().parent.parent

# Output channels that stay in conv1 and conv2 of each block; conv3, which the blocks of a stage share, keeps all.
PAPER_RESNET50 = {
    "layer1": [(45, 26), (11, 11), (29, 31)],
    "layer2": [(61, 56), (38, 44), (27, 37), (25, 43)],
    "layer3": [(172, 144), (136, 131), (146, 118), (79, 100), (157, 104), (167, 131)],
    "layer4": [(452, 447), (512, 460), (506, 492)],
}

TIMM_PRUNED = {  # name: (timm's file, its unpruned base)
    "ecaresnet50d_knapsack_pruned": ("ecaresnet50d_pruned", "ecaresnet50d"),
    "ecaresnet101d_knapsack_pruned": ("ecaresnet101d_pruned", "ecaresnet101d"),
    "efficientnet_b1_knapsack_pruned": ("efficientnet_b1_pruned", "tf_efficientnet_b1"),
    "efficientnet_b2_knapsack_pruned": ("efficientnet_b2_pruned", "tf_efficientnet_b2"),
    "efficientnet_b3_knapsack_pruned": ("efficientnet_b3_pruned", "tf_efficientnet_b3"),
}


def paper_resnet50() -> ChannelConfig:
    """The paper's ResNet-50: 2.0207e9 MACs of 4.0892e9."""
    import timm
    import torch

    from timm_knapsack.channels.find_groups import find_channel_groups
    from timm_knapsack.slim.cutting import channel_config_of

    with torch.device("meta"):
        model = timm.create_model("resnet50")
    groups = find_channel_groups(model)
    keep = {
        f"{stage}.{block}.conv{conv + 1}": range(width)
        for stage, blocks in PAPER_RESNET50.items()
        for block, widths in enumerate(blocks)
        for conv, width in enumerate(widths)
    }
    config = channel_config_of(groups, keep, "resnet50").architecture()  # which channels stayed is not published
    return config.renamed("resnet50_knapsack_2g")


def named_configs() -> dict[str, ChannelConfig]:
    from timm_knapsack.models.timm_txt import load_timm_txt

    configs = [paper_resnet50()]
    configs += [load_timm_txt(variant, base, name) for name, (variant, base) in TIMM_PRUNED.items()]
    return {config.name: config for config in configs}


def wanted_files() -> dict[Path, str]:
    """Every generated file and what it must contain."""
    files = {
        REPOSITORY / "timm_knapsack" / "models" / "channel_configs" / f"{name}.json": config.to_json()
        for name, config in named_configs().items()
    }
    from timm_knapsack.hub.model_card import named_model_card

    for path in sorted((REPOSITORY / "timm_knapsack" / "models" / "channel_configs").glob("*.json")):
        files[REPOSITORY / "model_cards" / f"{path.stem}.md"] = str(named_model_card(path.stem))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check = parser.parse_args().check
    stale = 0
    for path, text in wanted_files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'not current' if check else 'written'}: {path.relative_to(REPOSITORY)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
