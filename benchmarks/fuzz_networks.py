"""Random networks from a grammar of tricks: does any come out of pruning different, without a word?

usage: python benchmarks/fuzz_networks.py [--count 2000] [--first 0] [--verify auto | values | shapes]

Each network (``tricky_nets``) goes through find_channel_groups; then units are drawn at random, three times, and the
slim network's outputs are compared with those of the full one in which the removed units' weights are zero, in float64.
Over the groups that no norm runs across; and over all groups, with each norm replaced by something that treats every
channel alone, where norms are all that combines channels. Nothing of this uses the package's own verification. Prints
each network that differs by more than 1e-9, and every exception but a TraceError.

A network that does something else at one width alone may pass the widths that find_channel_groups draws; pruning checks
the widths it has chosen. So a difference counts as noticed where that check names a group, and as silent else.
"""

import argparse
import collections
import random
import shlex
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks.coverage, when run as a script

import timm_knapsack as tk
from benchmarks.coverage import randomise
from benchmarks.tricky_nets import IMAGE, Normed, TrickyNet, tricky_net
from timm_knapsack.channels.find_groups import find_channel_groups
from timm_knapsack.channels.verification import differing
from timm_knapsack.slim.channel_groups import ChannelGroups
from timm_knapsack.slim.cutting import mask_model, slice_model

TOLERANCE = 1e-9


@dataclass
class Outcome:
    """A network, its groups, the largest relative difference between slim and masked that nobody noticed, over several
    choices, and whether there were some that pruning notices at the widths it has chosen."""

    net: TrickyNet
    groups: ChannelGroups
    difference: float = 0.0
    noticed: bool = False


def compared(seed: int, verify: str = "auto", keeps: int = 3) -> Outcome:
    """The outcome for the network of this seed."""
    net = tricky_net(seed)
    randomise(net)
    groups = find_channel_groups(net, torch.empty(IMAGE), verify=verify)
    outcome = Outcome(net, groups)
    for number in range(keeps):
        draw = random.Random(f"{seed} {number}")
        keep = {g.name: sorted(draw.sample(range(g.size), draw.randint(1, g.size))) for g in groups}
        exact = {name: units for name, units in keep.items() if not groups[name].crosses_norm}
        differences = [_difference(net, groups, exact)]
        if all(trick.zero_is_removed for trick in net.tricks):
            Normed.stand_in = True
            try:
                differences.append(_difference(net, groups, keep))
            finally:
                Normed.stand_in = False
        if not max(differences) <= TOLERANCE and differing(groups, net, groups.check_keep(keep)):
            outcome.noticed = True
        else:
            outcome.difference = max(outcome.difference, *differences)
    return outcome


@torch.no_grad()
def _difference(net: TrickyNet, groups: ChannelGroups, keep) -> float:
    double = mask_model(net, groups, {}).double()
    x = torch.randn((2, *IMAGE[1:]), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    masked = mask_model(double, groups, keep)(x)
    try:
        slim = slice_model(double, groups, keep)(x)
    except Exception:  # not silent, but no better
        return float("inf")
    return ((slim - masked).abs().max() / masked.abs().max().clamp_min(1e-30)).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verify", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}")
    start, wrong, noticed, raised, refused, pruned, found = time.perf_counter(), 0, 0, 0, 0, 0, 0
    how: collections.Counter[str] = collections.Counter()
    tricks: collections.Counter[str] = collections.Counter()
    for seed in range(args.first, args.first + args.count):
        try:
            outcome = compared(seed, args.verify)
        except tk.errors.TraceError as error:
            refused += 1
            print(f"seed {seed}: {tricky_net(seed)}: refused: {error}", flush=True)
            continue
        except Exception:
            raised += 1
            print(f"seed {seed}: {tricky_net(seed)}: raised\n{traceback.format_exc(limit=-2)}", flush=True)
            continue
        groups = outcome.groups
        how[groups.verified] += 1
        found += len(groups)
        noticed += outcome.noticed
        tricks.update(type(trick).__name__ for trick in outcome.net.tricks)
        pruned += any(name == "stem" or name.startswith("layers") for name in groups.by_name)
        if not outcome.difference <= TOLERANCE:
            wrong += 1
            print(f"seed {seed}: {outcome.net}: differs by {outcome.difference:.2g}; {groups.by_name}", flush=True)
        elif outcome.noticed:
            print(f"seed {seed}: {outcome.net}: noticed at the widths chosen", flush=True)
        if (seed - args.first) % 100 == 99:
            print(f"{seed - args.first + 1} networks, {wrong} silently different", file=sys.stderr, flush=True)
    print(f"tricks drawn: {', '.join(f'{name} {count}' for name, count in sorted(tricks.items()))}")
    print(f"verified: {', '.join(f'{way} {count}' for way, count in how.items())}; {found} groups in {pruned} networks")
    print(
        f"{args.count} networks: {wrong} silently different, {noticed} noticed at the widths chosen only, "
        f"{raised} raised, {refused} refused "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return int(wrong + raised > 0)


if __name__ == "__main__":
    sys.exit(main())
