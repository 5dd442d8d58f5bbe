"""prune → save_pretrained → timm.create_model("local-dir:…") in a new process → equal outputs, one model per family.

    python benchmarks/roundtrip_families.py [--models NAME …] [--out benchmarks/results/roundtrip_families.txt]

Each model gets random weights (norms and all), is pruned to half of its MACs (or as far as it goes) by random scores,
saved, and run on one random image. A second process, which only imports timm_knapsack and timm, loads each folder and
must give the same output, bit for bit, and the same state dict.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# One small model of each timm model file that has one below 15 M parameters, and a few larger ones.
FAMILIES = """
starnet_s050 dla46x_c mobilevit_xxs edgenext_xx_small mobilenetv3_small_050 mobilenetv2_035 ese_vovnet19b_slim_dw
convnext_zepto_rms repghostnet_050 efficientvit_m0 ghostnet_050 regnetx_002 iformer_t xcit_nano_12_p8_224
cs3darknet_focus_s efficientvit_b0 swiftformer_xs efficientformerv2_s0 pvt_v2_b0 fasternet_t0 fastvit_t8 lcnetv2_small
inception_next_atto rexnet_100 mobileone_s1 pit_ti_224 hardcorenas_b resnet10t repvit_m1 vit_tiny_patch16_dinov3_qkvb
coat_tiny convit_tiny deit_tiny_patch16_224 vit_tiny_patch16_224 gmlp_ti16_224 hgnetv2_b0 shvit_s1 cpubone_nano
efficientvim_m1 crossvit_tiny_240 mambaout_femto levit_128s densenet121 nf_regnet_b0 dpn48b visformer_tiny resnest14d
resnetv2_18 skresnet18 cait_xxs24_224 tiny_vit_5m_224 hrnet_w18_small swin_tiny_patch4_window7_224 vgg11
""".split()


def save_one(name: str, folder: Path) -> str:
    """Prune and save one model; the image and what the model says to it go beside it."""
    import timm
    import torch

    import timm_knapsack as tk
    from timm_knapsack.slim.example_inputs import example_input

    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.dim() == 1:  # norms and biases, which start equal everywhere
                tensor.add_(torch.rand_like(tensor) * 0.1)
            elif "layer_scale" in tensor_name or "gamma" in tensor_name:
                tensor.add_(torch.rand_like(tensor))
    groups = tk.find_channel_groups(model)
    target = max(0.5, groups.macs([1] * len(groups)) / groups.macs() * 1.02)
    scores = tk.taylor_scores(model, groups, criterion="random")
    result = tk.prune(model, scores=scores, budget=tk.Budget(macs=target), groups=groups)
    tk.save_pretrained(result, folder, verify=False)  # the other process verifies
    image = torch.randn(example_input(model))
    with torch.no_grad():
        output = result.model.eval()(image)
    torch.save({"image": image, "output": output, "state": result.model.state_dict()}, folder / "expected.pt")
    line = result.report.line("macs")
    return f"{line.counted / line.original:.1%}"


def load_one(folder: Path) -> str:
    """What a new user does: import, create, run."""
    import timm
    import torch

    expected = torch.load(folder / "expected.pt", weights_only=True)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    state = model.state_dict()
    if state.keys() != expected["state"].keys() or not all(
        torch.equal(state[k], v) for k, v in expected["state"].items()
    ):
        return "state dict differs"
    with torch.no_grad():
        output = model(expected["image"])
    pairs = zip(*(x if isinstance(x, (tuple, list)) else [x] for x in (output, expected["output"])), strict=True)
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    return "equal" if worst == 0 else f"outputs differ by {worst:.2e}"


def worker(stage: str, root: Path, names: list[str]) -> None:
    import torch

    import timm_knapsack  # noqa: F401

    torch.set_num_threads(1)
    for name in names:
        start = time.perf_counter()
        try:
            said = save_one(name, root / name) if stage == "save" else load_one(root / name)
        except Exception as error:  # one line per model, whatever happens
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        print(f"{name}\t{said}\t{time.perf_counter() - start:.1f}", flush=True)


def run(names: list[str]) -> list[tuple[str, str, str, str, str]]:
    """``(model, MACs left, verdict, seconds to save, seconds to load)``."""
    with tempfile.TemporaryDirectory() as root:
        answers = {}
        for stage in ("save", "load"):
            command = [sys.executable, __file__, "--stage", stage, "--root", root, "--models", *names]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            answers[stage] = dict(
                (line.split("\t")[0], line.split("\t")[1:]) for line in done.stdout.splitlines() if "\t" in line
            )
    rows = []
    for name in names:
        left, saving = answers["save"][name]
        verdict, loading = answers["load"][name]
        rows.append(
            (name, left if left.endswith("%") else "", verdict if left.endswith("%") else left, saving, loading)
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=FAMILIES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stage", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        worker(args.stage, args.root, args.models)
        return 0
    rows = run(args.models)
    equal = sum(row[2] == "equal" for row in rows)
    lines = [f"{'model':<34}{'MACs left':>10}  {'loaded in a new process':<30}{'save s':>8}{'load s':>8}"]
    lines += [
        f"{name:<34}{left:>10}  {verdict:<30}{saving:>8}{loading:>8}" for name, left, verdict, saving, loading in rows
    ]
    lines.append(f"{equal} of {len(rows)} equal, bit for bit")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(equal != len(rows))


if __name__ == "__main__":
    sys.exit(main())
