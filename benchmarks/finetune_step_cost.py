"""What a distilling step costs: KD + inner KD at the blocks against teacher forward + student forward and backward.

    python benchmarks/finetune_step_cost.py

Both steps run alternately in one process, so that a busy machine slows both; medians are compared, of the time on the
wall and of the CPU time, which other processes disturb less. The limit is for the wall. The student is a
ResNet-18 with all widths at 0.7, about half of the MACs, so every block has its ``M_l``. Without the optimiser, which
is the same in both. The result goes to ``benchmarks/results/finetune_step_cost.txt``.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import timm_knapsack  # noqa: F401  (before timm)

import timm  # isort: skip
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule

LIMIT = 1.10


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at", default="blocks", choices=["blocks", "convs", "stages"])
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    teacher = timm.create_model("resnet18").eval()
    student = timm.create_model("resnet18", channels=(45, 90, 179, 358), stem_width=45)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    targets = torch.randint(0, 1000, (options.batch_size,))
    module = DistillationModule(student, teacher, DistillationConfig(ikd_at=options.at), example=images[:1])
    module.init_from_data([images[:2]])
    module.train()

    def plain_step():
        """The least that any distillation needs."""
        with torch.no_grad():
            teacher(images)
        F.cross_entropy(student(images), targets).backward()

    def distilling_step():
        module(images, targets).total.backward()

    def timed(step):
        module.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        return time.perf_counter() - wall, time.process_time() - cpu

    for step in (plain_step, distilling_step):
        timed(step)
    rounds = [(timed(plain_step), timed(distilling_step)) for _ in range(options.rounds)]
    medians = {}
    for kind, name in enumerate(("wall", "CPU")):
        medians[name] = [statistics.median(pair[step][kind] for pair in rounds) for step in (0, 1)]
    ratio = medians["wall"][1] / medians["wall"][0]
    ratios = sorted(distilling[0] / plain[0] for plain, distilling in rounds)
    size = f"batch {options.batch_size}, {options.image_size} px, {options.threads} thread(s)"
    today = datetime.datetime.now(datetime.timezone.utc)
    lines = [
        f"command: python {' '.join(sys.argv)}",
        f"date: {today:%Y-%m-%d %H:%M} UTC; {platform.machine()}; torch {torch.__version__}; timm {timm.__version__}",
        f"ResNet-18 teacher, student with widths × 0.7, {size}, {len(module.taps)} maps, {len(module.projections)} M_l",
        f"plain step: teacher forward + student forward and backward; distilling step: CE + KD + IKD at {options.at}",
    ]
    for name, (plain, distilling) in medians.items():
        lines.append(
            f"{name:4} time, median of {options.rounds}: plain {1e3 * plain:.1f} ms, "
            f"distilling {1e3 * distilling:.1f} ms, ratio {distilling / plain:.3f}"
        )
    lines.append(
        "wall ratios of neighbouring steps, quartiles: "
        + " ".join(f"{ratios[len(ratios) * q // 4]:.3f}" for q in (1, 2, 3))
    )
    lines.append(f"{'PASS' if ratio <= LIMIT else 'FAIL'}: {ratio:.3f}, limit {LIMIT}")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    name = "finetune_step_cost.txt" if options.at == "blocks" else f"finetune_step_cost_{options.at}.txt"
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / name).write_text(text, encoding="utf-8")
    return ratio > LIMIT


if __name__ == "__main__":
    sys.exit(main())
