"""One call for every network: tk.prune(model, loader, budget=tk.Budget(macs=f)); top-1 without labels and training.

    python benchmarks/choice.py                        # every network, budget and column: many hours on 2 cores
    python benchmarks/choice.py --nets resnet20 --budgets 0.5 --images 128 --test 500 --threads 1

Columns, all with the same calibration images (1024 of CIFAR-10's training images, ImageNet's 1000 beside the weights):

ours           tk.prune(model, loader, budget=tk.Budget(macs=f)): value curves, trials, knapsack, recovery by
               least squares (closed form layer by layer, then Gauss-Newton steps block by block); no other option
closed-form    the same widths, recovered in closed form alone (tk.recover(…, joint=0))
refined        tk.prune(…, refine=True): recovered on seven of eight images, then tk.refine: gradients, but no labels
paper          the paper's Taylor scores and knapsack (method="paper"), then tk.recover
threshold      a global threshold on the same Taylor scores, to the same MACs, then tk.recover
uniform        the same share of every group, its best units by the same scores, then tk.recover
torch-pruning  Torch-Pruning 1.6.1 (pip install "timm-knapsack[bench]"): GroupTaylor, global, in five steps, then new
               BatchNorm statistics; where it fails on a network, with the residual streams left alone

Values are measured once for each network and kept in ~/.cache/timm-knapsack/choice, under a name that changes with the
code that makes them; each row states the seconds that its curves or scores took when they were measured. Rows go to
benchmarks/results/choice.txt as they come; those that are there are left out of the next run unless --again is given.
The last row of several alike holds.

With --quick the other columns are recovered in closed form alone, layer by layer and without views, which takes a third
of the time; compare them with the column closed-form, which is ours recovered likewise.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from competitors import by_threshold, by_torch_pruning, by_uniform_ratio
from output import writer
from real_networks import NETWORKS, RealNetwork

import timm_knapsack as tk
from timm_knapsack.recovery.batchnorm import reestimate_batchnorm
from timm_knapsack.recovery.refinement import images_to_fit, refine_steps
from timm_knapsack.training.evaluation import evaluate
from timm_knapsack.values.valuation import load_values

BUDGETS = {
    "resnet56": (0.5, 0.35),
    "resnet20": (0.5,),
    "resnet50": (0.7, 0.5),
    "lite0": (0.7, 0.5),
    "deit_tiny": (0.7, 0.54),
}  # of issue 21's table
BATCH = 50
CACHE = Path("~/.cache/timm-knapsack/choice").expanduser()
RESULTS = Path(__file__).resolve().parent / "results" / "choice.txt"
PACKAGE = Path(tk.__file__).parent
HEADER = (
    f"{'net':<11}{'asked':>6} {'column':<14}{'images':>7}{'tested':>7}{'original':>9}{'top-1':>8}{'lost':>7}"
    f"{'counted':>9}{'curves s':>10}{'choice s':>10}{'recovery s':>11}  when, commit"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--budgets", nargs="+", type=float, help="shares of the MACs; those of the table by default")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--images", type=int, default=1024, help="calibration images, at most")
    parser.add_argument("--test", type=int, help="test images; all by default")
    parser.add_argument("--quick", action="store_true", help="other columns than ours: recovered in closed form alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure rows that are there, and their values, again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    say = writer(options.out)
    new = not options.out.exists()
    if new:
        say(HEADER)
    else:
        print(HEADER)
    for name in options.nets:
        todo = [
            (budget, column)
            for budget in options.budgets or BUDGETS[name]
            for column in options.columns
            if options.again or not _has_row(options.out, name, budget, column, options)
        ]
        if todo:
            _rows(name, todo, options, say)
    print(_table(options.out, options))


def _rows(name, todo, options, say) -> None:
    network = NETWORKS[name]()
    job = Job(name, network, network.train(batch_size=BATCH, limit=options.images), options.again, options.quick)
    test = network.test(batch_size=100, limit=options.test)
    before = evaluate(network.model, test)
    original = tk.count_macs(network.model)
    for budget, column in todo:
        start = f"{name:<11}{budget:>6} {column:<14}{options.images:>7}{before['samples']:>7}{before['top1']:>9.2f}"
        try:
            made = COLUMNS[column](job, budget)
        except ImportError as error:
            print(f"{start}  left out: {error}", flush=True)
            continue
        except Exception as error:  # a competitor that can't prune this network is a row too
            if column in ("ours", "closed-form", "refined"):
                raise
            say(f"{start}  failed: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}")
            continue
        after = evaluate(made.model, test)["top1"]
        counted = tk.count_macs(made.model) / original
        say(
            f"{start}{after:>8.2f}{before['top1'] - after:>7.2f}{counted:>9.4f}{made.curves:>10.1f}{made.choice:>10.1f}"
            f"{made.recovery:>11.1f}  {_now()} {_commit()}, {options.threads} threads, load {os.getloadavg()[0]:.1f}"
            + (f"; {made.note}" if made.note else "")
        )


# ---- the columns ----------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """A smaller network, and the seconds that its values, the choice and the recovery took."""

    model: torch.nn.Module
    curves: float
    choice: float
    recovery: float
    note: str = ""


class Job:
    """A network with its calibration images; values are measured once."""

    def __init__(self, name: str, network: RealNetwork, loader, again: bool, quick: bool):
        self.recovery = {"joint": 0, "views": False} if quick else {}
        self.name, self.original, self.loader, self.again = name, network.model, list(loader), again
        self.dataset = loader.dataset
        self.model = tk.turn_heads(self.original, self.loader)  # as tk.prune does it, where there are heads
        self.groups = tk.find_channel_groups(self.model)
        self.whole = self.groups if self.model is self.original else tk.find_channel_groups(self.original)
        self.known = {}
        self.made: dict[float, Made] = {}
        self.kept: dict[float, tuple] = {}  # units and channels of what was made

    def values(self, kind: str, measure: Callable):
        """Values and the seconds they took, from the file if they were measured with the same code and images."""
        model, groups = (self.model, self.groups) if kind == "curves" else (self.original, self.whole)
        if kind not in self.known:
            path = CACHE / f"{self.name}-{kind}-{len(self.dataset)}-{_digest()}.safetensors"
            seconds = path.with_suffix(".json")
            if path.exists() and seconds.exists() and not self.again:
                self.known[kind] = load_values(path, groups), json.loads(seconds.read_text())["seconds"]
            else:
                start = time.perf_counter()
                values = measure(model, groups, self.loader)
                took = time.perf_counter() - start
                CACHE.mkdir(parents=True, exist_ok=True)
                values.save(path)
                seconds.write_text(json.dumps({"seconds": took, "threads": torch.get_num_threads()}))
                self.known[kind] = values, took
        return self.known[kind]

    def taylor(self):
        return self.values("abs", tk.taylor_scores)


def ours(job: Job, budget: float) -> Made:
    """The plain call; its curves are handed in, as they are the same for every budget."""
    curves, seconds = job.values("curves", tk.value_curves)
    start = time.perf_counter()
    result = tk.prune(job.model, job.loader, budget=tk.Budget(macs=budget), scores=curves, groups=job.groups)
    took = time.perf_counter() - start
    print(f"  {result.report.outcome}", flush=True)
    job.made[budget] = made = Made(result.model, seconds, result.report.seconds, took - result.report.seconds)
    tried = " ".join(f"{power}:{loss:.3g}" for power, loss in result.report.trials.items())
    made.note = f"predicted {result.report.predicted_loss:.3g}, tried {tried}"
    job.kept[budget] = result.keep, result.kept_channels
    return made


def closed_form(job: Job, budget: float) -> Made:
    """The widths that the column before has chosen, every layer fitted by itself and no more."""
    slim, kept = _cut_again(job, budget)
    start = time.perf_counter()
    tk.recover(slim, job.model, job.loader, kept=kept, **{"joint": 0, **job.recovery})
    return Made(slim, job.made[budget].curves, job.made[budget].choice, time.perf_counter() - start)


def refined(job: Job, budget: float) -> Made:
    """tk.prune(…, refine=True): the widths of the plain call, recovered without the images that judge, then refined."""
    slim, kept = _cut_again(job, budget)
    made = job.made[budget]
    start = time.perf_counter()
    tk.recover(slim, job.model, images_to_fit(job.loader), kept=kept)
    middle = time.perf_counter()
    found = refine_steps(slim, job.model, job.loader, kept=kept)
    took = time.perf_counter() - middle
    note = f"{found.steps} gradient steps, {took:.0f} s; held-out KL {found.before:.3g} to {found.after:.3g}"
    return Made(slim, made.curves, made.choice, middle - start + took, note)


def _cut_again(job: Job, budget: float) -> tuple[torch.nn.Module, dict]:
    """The widths that the plain call has chosen, nothing refitted yet, and which channels these are."""
    if budget not in job.kept:
        ours(job, budget)
    keep, kept = job.kept[budget]
    return tk.slice_model(job.model, job.groups, keep), kept


def paper(job: Job, budget: float) -> Made:
    """tk.prune(…, method="paper") with its scores handed in, then tk.recover."""
    scores, seconds = job.taylor()
    result = tk.prune(job.original, budget=tk.Budget(macs=budget), scores=scores, groups=job.whole)
    return _recovered(job, result.model, result.kept_channels, seconds, result.report.seconds)


def threshold(job: Job, budget: float) -> Made:
    return _by_scores(job, by_threshold, budget)


def uniform(job: Job, budget: float) -> Made:
    return _by_scores(job, by_uniform_ratio, budget)


def _by_scores(job: Job, choose: Callable, budget: float) -> Made:
    scores, seconds = job.taylor()
    start = time.perf_counter()
    slim, kept = choose(job.original, job.whole, scores, budget * job.whole.macs())
    return _recovered(job, slim, kept, seconds, time.perf_counter() - start)


def _recovered(job: Job, slim, kept, curves: float, choice: float) -> Made:
    start = time.perf_counter()
    tk.recover(slim, job.original, job.loader, kept=kept, **job.recovery)
    note = ", ".join(f"{name}={value}" for name, value in job.recovery.items())
    return Made(slim, curves, choice, time.perf_counter() - start, note)


def torch_pruning(job: Job, budget: float) -> Made:
    import torch_pruning  # noqa: F401  (a row is left out without it)

    start = time.perf_counter()
    slim, note = by_torch_pruning(job.original, job.whole, job.loader, budget * job.whole.macs())
    choice = time.perf_counter() - start
    start = time.perf_counter()
    reestimate_batchnorm(slim, job.loader)
    return Made(slim, 0.0, choice, time.perf_counter() - start, note)


COLUMNS: dict[str, Callable[[Job, float], Made]] = {
    "ours": ours, "closed-form": closed_form, "refined": refined, "paper": paper, "threshold": threshold,
    "uniform": uniform, "torch-pruning": torch_pruning,
}  # fmt: skip


# ---- rows and files -------------------------------------------------------------------------------------------------


def _found(path: Path) -> dict[tuple[str, ...], list[str]]:
    """Rows by net, budget, column, images and test images; the last of several alike."""
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {(*row[:4], row[4]): row for row in rows if len(row) > 6 and row[0] in BUDGETS}


def _has_row(path: Path, name: str, budget: float, column: str, options) -> bool:
    alike = [key for key in _found(path) if key[:4] == (name, f"{budget}", column, f"{options.images}")]
    return any(options.test is None or int(key[4]) == options.test for key in alike if _is_whole(key) or options.test)


def _is_whole(key: tuple[str, ...]) -> bool:
    return int(key[4]) == (10_000 if key[0] in ("resnet56", "resnet20") else 1000)


def _table(path: Path, options) -> str:
    """Networks and budgets down, columns across: top-1."""
    cells = {key[:3]: row[6] for key, row in _found(path).items() if int(key[3]) == options.images
             and (int(key[4]) == options.test if options.test else _is_whole(key))}  # fmt: skip
    lines = ["", f"{'top-1':<18}" + "".join(f"{column:>15}" for column in COLUMNS)]
    for name, budget in dict.fromkeys(key[:2] for key in cells):
        row = [cells.get((name, budget, column), "–") for column in COLUMNS]
        lines.append(f"{name:<11}{budget:>7}" + "".join(f"{cell:>15}" for cell in row))
    return "\n".join(lines)


def _digest() -> str:
    """Of the code that makes values."""
    files = sorted(file for room in ("values", "maps", "slim") for file in (PACKAGE / room).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def _now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}"


def _commit() -> str:
    command = ["git", "-C", PACKAGE, "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no commit"


if __name__ == "__main__":
    sys.exit(main())
