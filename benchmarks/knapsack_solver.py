"""How fast solve_knapsack proves the optimum for whole networks, beside Algorithm 1 ("dp") and the published greedy.

Items are the output channels of every conv: 52 672 in resnet101, 91 640 in efficientnet_b4. An item's weight is what
its conv spends on it in MACs at the model's default input size, alone or with the next conv's share (the paper's F);
values are random with a fixed seed, in several shapes; the capacity is half of the total. Seconds are medians over the
rounds, methods interleaved in each, one thread: of the CPU, which other processes disturb little, and on the wall, with
the least as well. "misses" is the part of the optimal value that greedy leaves.

    OMP_NUM_THREADS=1 python benchmarks/knapsack_solver.py | tee benchmarks/results/knapsack_solver.txt
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import time

import numpy as np
import torch

import timm_knapsack
from timm_knapsack.errors import BudgetError
from timm_knapsack.knapsack.solve import solve_knapsack

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)


def conv_costs(name):
    """For each conv in the order of execution: output channels, MACs of one of them, MACs of one input channel."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.zeros(1, *model.default_cfg["input_size"])
    costs = []

    def record(conv, inputs, output):
        macs = conv.weight.shape[1:].numel() * output.shape[-2:].numel()
        costs.append((conv.out_channels, macs, macs * conv.out_channels // conv.in_channels))

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(record)
    model(images)
    return np.array(costs).T


def channel_weights(name, with_next):
    """(channels of each conv, weight of one of them)."""
    channels, output_macs, input_macs = conv_costs(name)
    return channels, output_macs + (np.append(input_macs[1:], 0) if with_next else 0)


def lognormal(rng, channels, weights):
    return np.concatenate([rng.lognormal(rng.normal(0, 1), 0.5, count) for count in channels])


def heavy_tailed(rng, channels, weights):
    return np.concatenate([rng.lognormal(0, 2) * rng.pareto(1.1, count) for count in channels])


def near_constant(rng, channels, weights):
    return 1 + 1e-3 * rng.standard_normal(channels.sum())


def all_equal(rng, channels, weights):
    return np.full(channels.sum(), 0.37)


def equal_in_layer(rng, channels, weights):
    return np.repeat(rng.lognormal(0, 1, len(channels)), channels)


def like_weight(rng, channels, weights):
    return weights * (1 + 1e-3 * rng.standard_normal(len(weights)))


def equal_to_weight(rng, channels, weights):
    return weights * 0.1


SHAPES = [lognormal, heavy_tailed, near_constant, all_equal, equal_in_layer, like_weight, equal_to_weight]


def timed(*arguments, **options):
    """(seconds on the wall, seconds of CPU, the solution)."""
    wall, processor = time.perf_counter(), time.process_time()
    solution = solve_knapsack(*arguments, **options)
    return time.perf_counter() - wall, time.process_time() - processor, solution


def network_rows(name, with_next, rounds):
    channels, per_channel = channel_weights(name, with_next)
    weights = np.repeat(per_channel, channels)
    divisor, capacity = int(np.gcd.reduce(weights)), int(weights.sum()) // 2
    print(f"\n{name}, weight = {'own MACs + next conv' if with_next else 'own MACs'}: {len(weights)} items, "
          f"{len(np.unique(weights))} distinct weights, GCD {divisor}, capacity/GCD {capacity // divisor}")  # fmt: skip
    print(f"  {'values':16} {'exact: CPU':>10} {'wall':>8} {'least':>8} {'proven':>7} {'greedy':>12} {'misses':>8}")
    for shape in SHAPES:
        values = shape(np.random.default_rng(0), channels, weights)
        exact_runs, greedy_runs = [], []
        for _ in range(rounds):
            exact_runs.append(timed(values, weights, capacity))
            greedy_runs.append(timed(values, weights, capacity, method="greedy"))
        walls, processors, (exact, *_) = zip(*exact_runs, strict=True)
        _, greedy_processors, (greedy, *_) = zip(*greedy_runs, strict=True)
        print(f"  {shape.__name__:16} {statistics.median(processors):10.4f} {statistics.median(walls):8.4f} "
              f"{min(walls):8.4f} {exact.is_optimal!s:>7} {statistics.median(greedy_processors):12.4f} "
              f"{1 - greedy.value / exact.value:8.1e}", flush=True)  # fmt: skip


def sweep_row(name, with_next, seeds):
    """The worst of many, in CPU time: every shape of values, seeds, capacities from 0.1 to 0.9 of the total."""
    channels, per_channel = channel_weights(name, with_next)
    weights = np.repeat(per_channel, channels)
    total, runs = int(weights.sum()), []
    for shape in SHAPES:
        for seed in range(seeds):
            values = shape(np.random.default_rng([1, seed]), channels, weights)
            for tenths in (1, 3, 5, 7, 9):
                _, seconds, solution = timed(values, weights, total * tenths // 10)
                runs.append((seconds, solution.is_optimal, f"{shape.__name__} at 0.{tenths}"))
    seconds, _, slowest = max(runs)
    median, proven = statistics.median(run[0] for run in runs), sum(run[1] for run in runs)
    weight = "own + next" if with_next else "own"
    print(f"  {name:16} {weight:10} {proven} of {len(runs)} proven, median {median:.4f} s, slowest {seconds:.4f} s "
          f"({slowest})", flush=True)  # fmt: skip


def beside_dp(name, rounds):
    """The ratio to Algorithm 1, both in one run; equal value asserted."""
    channels, per_channel = channel_weights(name, with_next=False)
    weights = np.repeat(per_channel, channels)
    capacity = int(weights.sum()) // 2
    values = lognormal(np.random.default_rng(0), channels, weights)
    print(f"\n{name}, lognormal values, beside Algorithm 1 (interleaved):")
    ratios = []
    for _ in range(rounds):
        (wall, processor, exact), (dp_wall, dp_processor, dp) = (
            timed(values, weights, capacity, method=method) for method in ("exact", "dp")
        )
        assert abs(exact.value - dp.value) <= 1e-12 * dp.value
        ratios.append(dp_processor / processor)
        print(f"  exact {processor:.4f} s of CPU, {wall:.4f} s on the wall; dp {dp_processor:.2f} s, {dp_wall:.2f} s; "
              f"ratio {ratios[-1]:.0f}, {dp_wall / wall:.0f}", flush=True)  # fmt: skip
    print(f"  median ratio of CPU times {statistics.median(ratios):.0f}; both are worth {exact.value!r}")


def dp_refusal(name):
    channels, per_channel = channel_weights(name, with_next=False)
    weights = np.repeat(per_channel, channels)
    try:
        solve_knapsack(np.ones(len(weights)), weights, int(weights.sum()) // 2, method="dp")
    except BudgetError as error:
        print(f'\n{name} with "dp": {error}')


def adversarial_rows():
    """Where the search can explode: what is proven, how long it takes, and what the certificate says if not."""
    rng = np.random.default_rng(3)
    print("\nadversarial instances (not networks), max_states = 5 million")
    print(f"  {'values':26} {'items':>6} {'weights up to':>13} {'CPU [s]':>8} {'proven':>7} {'bound/value - 1':>16}")
    for items in (100, 1000, 10_000):
        for largest in (10**3, 10**6, 10**9):
            weights = rng.integers(1, largest + 1, items)
            noise, step = rng.integers(-largest, largest + 1, items), largest // 10
            kinds = {
                "independent": rng.integers(1, largest + 1, items),
                "weight ± 10 %": (weights + noise // 10).clip(min=1),
                "weight + constant": weights + step,
                "weight + constant ± 0.2 %": weights + step + noise // 500,
                "weight - constant": (weights - step).clip(min=1),
                "weight (subset sum)": weights,
                "concave in weight": np.sqrt(4.0 * largest**2 - (weights - 2.0 * largest) ** 2),
            }
            for kind, values in kinds.items():
                _, seconds, solution = timed(values, weights, int(weights.sum()) // 2, max_states=5_000_000)
                print(f"  {kind:26} {items:6} {largest:13.0e} {seconds:8.3f} {solution.is_optimal!s:>7} "
                      f"{solution.upper_bound / solution.value - 1:16.1e}", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of exact and greedy")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the sweep")
    parser.add_argument("--dp-rounds", type=int, default=2, help="rounds beside dp, at 30 s; 0: none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ OMP_NUM_THREADS=1 python benchmarks/knapsack_solver.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{datetime.date.today()}, timm_knapsack {timm_knapsack.__version__}, timm {timm.__version__}, "
          f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}")  # fmt: skip
    print(f"load of the machine when it began: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name in ("resnet101", "efficientnet_b4"):
        for with_next in (False, True):
            network_rows(name, with_next, arguments.rounds)
    print("\nsweep over values, seeds and capacities, CPU time")
    for name in ("resnet101", "efficientnet_b4"):
        for with_next in (False, True):
            sweep_row(name, with_next, arguments.seeds)
    if arguments.dp_rounds:
        beside_dp("resnet101", arguments.dp_rounds)
    dp_refusal("efficientnet_b4")
    adversarial_rows()


if __name__ == "__main__":
    main()
