"""Memory of each GPU and hours of every ImageNet recipe, on paper: from counted MACs and stated assumptions.

    python benchmarks/training_paper_table.py --write docs/training.md

No GPU was at hand. What is counted: MACs of original and student (of the published budget), their parameters, and the
outputs of every conv, linear and norm layer on the meta device. What is assumed stands beside each number below. A
step costs one forward pass of the teacher and three of the student (forward, and twice that backward).
"""

import argparse
import sys
from pathlib import Path

import timm_knapsack as tk  # isort: skip  (before timm)
import timm
import torch

from timm_knapsack.pipeline.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MARK = "<!-- training_paper_table -->"
IMAGES = 1_281_167
MACS_PER_SECOND = 312e12 / 2 * 0.25  # an A100's bf16 peak of 312 TFLOPS, a quarter of which small convs reach
DEPTHWISE_MACS_PER_SECOND = 3e12  # networks of depthwise convs wait for memory: EfficientNet-B0 at some 2500 images/s
ACROSS = 0.92  # of the speed, with gradients averaged over 8 GPUs; 0.85 over 2 × 8
SETUPS = {"1 GPU": (1, 1.0), "8 GPUs": (8, ACROSS), "2 × 8 GPUs": (16, 0.85)}
OUTPUTS = (torch.nn.Conv2d, torch.nn.Linear, torch.nn.BatchNorm2d, torch.nn.LayerNorm)


def layer_outputs(model: torch.nn.Module, size: tuple[int, ...]) -> int:
    """Values that the layers of one image hold: what backward needs, as autograd keeps them."""
    total = 0

    def count(module, given, output):
        nonlocal total
        total += output.numel()

    hooks = [part.register_forward_hook(count) for part in model.modules() if isinstance(part, OUTPUTS)]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *size, device="meta"))
    for hook in hooks:
        hook.remove()
    return total


def row(path: Path) -> list[str]:
    recipe = Recipe.load(path)
    with torch.device("meta"):
        model = timm.create_model(recipe.model.name, **recipe.model.args)
    side = recipe.data.input_size
    size = (3, side, side) if side else model.default_cfg["input_size"]
    macs, params = tk.count_macs(model, size), sum(p.numel() for p in model.parameters())
    asked = recipe.budget.get("macs")
    share = (asked if asked <= 1 else asked / macs) if asked else None
    if share is None:  # a budget of time: its MACs are not known before it was measured
        return []
    tuning = recipe.finetune
    weights = tuning.get("distillation", {})
    distils = bool(weights.get("kd_weight", 1) or weights.get("ikd_weight", 20))
    step = (macs if distils else 0) + 3 * share * macs
    outputs = layer_outputs(model, size)
    # the student's layer outputs shrink with its widths, about as the root of its MACs; of the teacher's, inner
    # distillation holds those at the ends of blocks: about a sixth. Each conv's output is kept once more by its norm
    kept = outputs * share**0.5 + (outputs / 6 if distils else 0)
    batch = tuning["batch_size"]
    memory = batch * kept * 2 + params * share * (4 + 4 + 4 + 2) + params * 2 + 1.5e9
    convs = [part for part in model.modules() if isinstance(part, torch.nn.Conv2d)]
    depthwise = any(conv.groups == conv.in_channels > 1 for conv in convs)
    reached = DEPTHWISE_MACS_PER_SECOND if depthwise else MACS_PER_SECOND
    hours = {
        name: IMAGES * tuning["epochs"] * step / (reached * devices * speed) / 3600
        for name, (devices, speed) in SETUPS.items()
    }
    cells = [f"`{path.stem}`", f"{macs / 1e9:.2f} → {share * macs / 1e9:.2f}", f"{step / 1e9:.1f}", f"{batch}"]
    return [*cells, f"{memory / 1e9:.0f}", f"{tuning['epochs']}", *(f"{h:.1f}" for h in hours.values())]


def table() -> str:
    names = ["recipe", "GMACs", "GMACs of a step, each image", "batch on each GPU", "GB on each GPU", "epochs"]
    names += [f"hours on {name}" for name in SETUPS]
    rows = []
    for path in sorted(RECIPES.glob("*imagenet*_curves.yaml")):
        rows.append(row(path))
        print(rows[-1] or f"{path.stem}: a budget of time", file=sys.stderr, flush=True)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows if cells)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put the table between the marks of this page")
    options = parser.parse_args()
    text = table()
    if options.write is None:
        print(text)
        return
    before, _, rest = options.write.read_text(encoding="utf-8").partition(MARK)
    _, _, after = rest.partition(MARK)
    options.write.write_text(f"{before}{MARK}\n{text}\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
