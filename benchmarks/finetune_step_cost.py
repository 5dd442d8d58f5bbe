"""What a distilling step costs: KD + inner KD at the blocks against teacher forward + student forward and backward.

    python benchmarks/finetune_step_cost.py
    python benchmarks/finetune_step_cost.py --net resnet56 --batch-size 128 --bf16        # CIFAR-10's, real weights

Both steps run alternately in one process, so that a busy machine slows both; medians are compared, of the time on the
wall and of the CPU time, which other processes disturb less. The limit is for the wall. The student is a
ResNet-18 with all widths at 0.7, about half of the MACs, so every block has its ``M_l``; or the ResNet-56 that the
plain call makes at half of its MACs. Both steps keep their memory, as `tk.finetune` does. Without the optimiser, which
is the same in both. Results are appended to ``benchmarks/results/finetune_step_cost.txt``.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F

import timm_knapsack as tk  # before timm

import timm  # isort: skip
from timm_knapsack.maps.steady_memory import memory_kept
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule

LIMIT = 1.10


def networks(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Teacher and student."""
    if name == "resnet56":
        from finetune_starts import starting_point

        return tuple(net.to(memory_format=torch.channels_last) for net in starting_point(name, "curves", 0.5, 1024))
    return timm.create_model(name).eval(), timm.create_model(name, channels=(45, 90, 179, 358), stem_width=45)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--net", default="resnet18", choices=["resnet18", "resnet56"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at", default="blocks", choices=["blocks", "convs", "stages"])
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    teacher, student = networks(options.net)
    pixels = teacher.pretrained_cfg["input_size"][-1]
    images = torch.randn(options.batch_size, 3, pixels, pixels)
    targets = torch.randint(0, teacher.num_classes, (options.batch_size,))
    module = DistillationModule(student, teacher, DistillationConfig(ikd_at=options.at), example=images[:1])
    module.init_from_data([images[:2]])
    module.train()

    def precision():
        return torch.autocast("cpu", torch.bfloat16) if options.bf16 else nullcontext()

    def plain_step():
        """The least that any distillation needs."""
        with precision():
            with torch.no_grad():
                teacher(images)
            loss = F.cross_entropy(student(images).float(), targets)
        loss.backward()

    def distilling_step():
        with precision():
            loss = module(images, targets).total
        loss.backward()

    def timed(step):
        module.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        return time.perf_counter() - wall, time.process_time() - cpu

    with memory_kept():
        for step in (plain_step, distilling_step):
            timed(step)
        rounds = [(timed(plain_step), timed(distilling_step)) for _ in range(options.rounds)]
    medians = {}
    for kind, name in enumerate(("wall", "CPU")):
        medians[name] = [statistics.median(pair[step][kind] for pair in rounds) for step in (0, 1)]
    ratio = medians["wall"][1] / medians["wall"][0]
    ratios = sorted(distilling[0] / plain[0] for plain, distilling in rounds)
    size = f"batch {options.batch_size}, {pixels} px, {'bfloat16, ' * options.bf16}{options.threads} thread(s)"
    share = f"{tk.count_macs(student) / tk.count_macs(teacher):.0%} of its MACs"
    today = datetime.datetime.now(datetime.timezone.utc)
    lines = [
        f"command: python {' '.join(sys.argv)}",
        f"date: {today:%Y-%m-%d %H:%M} UTC; {platform.machine()}; torch {torch.__version__}; timm {timm.__version__}",
        f"{options.net}, student with {share}, {size}, {len(module.taps)} maps, {len(module.projections)} M_l",
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
    with (Path(__file__).parent / "results" / "finetune_step_cost.txt").open("a", encoding="utf-8") as file:
        file.write("\n" + text)
    return ratio > LIMIT


if __name__ == "__main__":
    sys.exit(main())
