"""Every name of the installed timm through trace, dry run, budgets and round trip: benchmarks/coverage_all.csv and
docs/coverage_all.md.

usage: python benchmarks/coverage_all.py [--names NAME …] [--jobs 2] [--cpu 600] [--memory 8] [--again] [--no-values]
       python benchmarks/coverage_all.py --page                     (writes the page from the rows that are there)

Each row is appended when it is there; names that have one are left out, so that a run goes on where the last one
stopped (--again: also those whose row is of other code, by the digest of channels/ and slim/). Models run in
worker processes with limits for CPU time and memory; a worker that dies takes one name with it.

For every name, on the meta device (nothing has values, so size does not matter):
- groups found, and tried by shapes; MACs from the trace = torch's FlopCounterMode / 2, at full size and at each budget
- random scores, budgets of 70, 50 and 30 % of the MACs: hit within 0.5 %, or no further unit fits, or, where the budget
  can't be reached, the smallest network there is
- ChannelConfig → JSON → resize_model gives the same shapes
For one name of each timm file (those of coverage.csv) and a random tenth of the others, up to 100 M parameters and 12 G
MACs, with values: groups tried by values, slim = masked in float64, forward and backward, save → load bit for bit.
"""

import argparse
import csv
import hashlib
import json
import os
import random
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import coverage  # noqa: E402

FIELDS = """
    model module params_m gmacs groups removable left_70 left_50 left_30 oracle values status frozen error cpu_s code
    """.split()
BUDGETS = (0.7, 0.5, 0.3)
MOST_PARAMETERS, MOST_MACS = 100e6, 12e9  # with values


# ---- one name, in a worker ----------------------------------------------------------------------------------------


def check(name: str, deep: bool) -> dict:
    """All checks for one name."""
    import timm
    import torch

    import timm_knapsack as tk
    from timm_knapsack.pruning.limits import Limits
    from timm_knapsack.slim.example_inputs import example_input

    torch.manual_seed(0)
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    row = {"model": name, "params_m": round(sum(p.numel() for p in model.parameters()) / 1e6, 2)}
    shape = example_input(model)
    failures = []
    wanted, deep = deep, deep and row["params_m"] * 1e6 <= MOST_PARAMETERS
    if deep and (by_torch := coverage.counted(model, shape)) <= MOST_MACS:
        model = timm.create_model(name).eval()
        coverage.randomise(model)
        groups = tk.find_channel_groups(model)
    else:
        deep = False
        groups = tk.find_channel_groups(model, verify="shapes")
        by_torch = coverage.counted(model, shape)
    full, least = groups.macs(), groups.macs([1] * len(groups))
    if by_torch != full:
        failures.append(f"{full} MACs traced, torch counts {by_torch}")
    row.update(gmacs=round(full / 1e9, 3), groups=len(groups), removable=round(1 - least / full, 4))
    row["values"] = groups.verified if deep else "too large" if wanted else "no"
    row["frozen"] = json.dumps(dict(Counter(map(in_short, groups.frozen.values())).most_common()))
    limits = Limits(groups, 1, 1, (), {})
    smallest = groups.macs([limits.range(group, 1)[0] for group in groups])
    reachable = [share for share in BUDGETS if smallest <= share * full]
    row.update({f"left_{share * 100:.0f}": round(smallest / full, 4) for share in BUDGETS})
    scores = {g.name: torch.rand(g.size, dtype=torch.float64) for g in groups}
    results = tk.sweep(model, scores, [tk.Budget(macs=share) for share in reachable], groups=groups) if groups else []
    for share, result in zip(reachable, results, strict=True):
        sizes = [len(result.keep[g.name]) for g in groups]
        left = result.report.line("macs").counted
        row[f"left_{share * 100:.0f}"] = round(left / full, 4)
        if left != groups.macs(sizes):
            failures.append(f"{groups.macs(sizes)} MACs predicted at {share:.0%}, torch counts {left}")
        if not (hits(left, share * full) or no_unit_fits(groups, sizes, share * full)):
            failures.append(f"{share:.0%} of the MACs asked, {left / full:.4f} left")
    if results:
        result = results[min(1, len(results) - 1)]
        failures += coverage.rebuilds(name, groups, result.keep, result.model)
        if deep:
            failures += with_values(model, groups, result, torch.randn(shape), row)
    row["error"] = "; ".join(failures)
    row["status"] = "wrong" if failures else "pass" if float(row["left_50"]) <= 0.5 else "frozen"
    return row


def hits(left: float, budget: float) -> bool:
    return 0.995 * budget <= left <= budget


def no_unit_fits(groups, sizes: list[int], budget: float) -> bool:
    """Whether one unit more of any group would be over the budget."""
    grown = ([n + (i == j) for j, n in enumerate(sizes)] for i in range(len(sizes)) if sizes[i] < groups[i].size)
    return groups.macs(sizes) <= budget and all(groups.macs(more) > budget for more in grown)


def with_values(model, groups, result, x, row: dict) -> list[str]:
    """What is wrong by values: the oracle, a training step, a saved and loaded model."""
    import timm
    import torch

    import timm_knapsack as tk

    row["oracle"], _, failures = coverage.oracle(model, groups, x)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        tk.save_pretrained(result, f"{folder}/slim")
        loaded = timm.create_model(f"local-dir:{folder}/slim", pretrained=True).eval()
        torch.manual_seed(0)
        expected = coverage.first(result.model.eval()(x))
        torch.manual_seed(0)
        if not torch.equal(coverage.first(loaded(x)), expected):
            failures.append("the loaded model computes something else than the saved one")
    return failures + coverage.trains(result.model, x)


def in_short(reason: str) -> str:
    """A reason without the module's name and without sizes, so that reasons can be counted."""
    reason = re.sub(r" in [\w.]+\)", ")", reason)
    return re.sub(r"\[[^]]*\]|\d+(\.\d+)?", "…", reason) if "fails:" in reason or "differ by" in reason else reason


def work(cpu: float, memory: float, nice: int) -> None:
    """Names from stdin, rows to stdout."""
    import torch

    import timm_knapsack  # noqa: F401

    code = code_digest()
    os.nice(max(0, nice - os.nice(0)))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory * 2**30),) * 2)
    torch.set_num_threads(1)

    def too_long(*_):
        raise TimeoutError(f"more than {cpu:.0f} s of CPU time")

    signal.signal(signal.SIGPROF, too_long)
    for line in sys.stdin:
        name, deep = json.loads(line)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, cpu)
        try:
            row = check(name, deep)
        except Exception as error:  # every name gets a row
            row = {"model": name, "status": "crash", "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print("ROW" + json.dumps({**row, "cpu_s": round(time.process_time() - start, 1), "code": code}), flush=True)


# ---- all names ----------------------------------------------------------------------------------------------------


class Worker:
    """A process that checks one name after the other; a new one where it dies, or after some names (torch's meta
    tensors are kept alive by caches)."""

    NAMES = 60

    def __init__(self, options):
        self.options, self.process, self.left = options, None, 0

    def row(self, name: str, deep: bool) -> dict:
        """The row of one name, whatever happens to the process."""
        if self.process is None or self.process.poll() is not None or not self.left:
            self.stop()
            command = [sys.executable, __file__, "--work", "--cpu", str(self.options.cpu)]
            command += ["--memory", str(self.options.memory), "--nice", str(self.options.nice)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process, self.left = subprocess.Popen(command, text=True, bufsize=1, **pipes), self.NAMES
        self.left -= 1
        self.process.stdin.write(json.dumps([name, deep]) + "\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + 20 * self.options.cpu  # on a busy machine CPU time passes slowly
            while (left := deadline - time.monotonic()) > 0 and waiting.select(left):
                line = self.process.stdout.readline()
                if line.startswith("ROW"):
                    return json.loads(line[3:])
                if not line:
                    return {"model": name, "status": "crash", "error": f"the process died ({self.process.wait()})"}
        self.stop()
        return {"model": name, "status": "crash", "error": f"more than {20 * self.options.cpu:.0f} s"}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def code_digest() -> str:
    """Of the code that decides which channels there are and how they are cut."""
    digest = hashlib.sha256()
    for room in ("channels", "slim"):
        for path in sorted((ROOT / "timm_knapsack" / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def ordered(names: list[str], families: list[str]) -> list[tuple[str, bool]]:
    """The smallest name of each kind first, modules in turn, those that `make sweep` has seen last; then the others:
    a run that is stopped has seen of everything something."""
    from timm.models import _registry

    tenth = set(random.Random(0).sample(sorted(names), len(names) // 10))
    kinds, by_module = defaultdict(list), defaultdict(list)
    for name in names:
        kinds[_registry._model_to_module.get(name, ""), kind_of(name)].append(name)
    for (module, _), members in kinds.items():
        by_module[module].append(min(members, key=lambda name: (name not in families, *size_in(name), name)))
    for members in by_module.values():
        members.sort(key=families.__contains__)
    firsts = [name for members in zip_longest(*by_module.values()) for name in members if name is not None]
    seen = set(firsts)
    rest = [name for name in sorted(names) if name not in seen]
    random.Random(0).shuffle(rest)
    return [(name, name in tenth or name in families) for name in firsts + rest]


SIZES = """
    zepto atto femto pico nano xxxs xxs xxtiny xtiny xs mini tiny t s0 s small m medium b base so l large xl xlarge xxl
    huge h giant g
    """.split()


def kind_of(name: str) -> str:
    """A name without its sizes: vit_base_patch16_224 and vit_tiny_patch16_384 are of one kind."""
    return "_".join("#" if part in SIZES else re.sub(r"\d+", "#", part) for part in name.split("_"))


def size_in(name: str) -> tuple[int, list[int]]:
    """What a name says of the size of its network, to compare it with others of its kind."""
    words = [SIZES.index(part) for part in name.split("_") if part in SIZES]
    return max(words, default=0), [int(number) for number in re.findall(r"\d+", name)]


def rows_of(path: str) -> dict[str, dict]:
    if not os.path.exists(path):
        return {}
    with open(path, newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}  # of several rows of one name the last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cpu", type=float, default=600, help="seconds of CPU time for each name")
    parser.add_argument("--memory", type=float, default=8, help="GB of address space for each worker")
    parser.add_argument("--nice", type=int, default=19, help="of the workers")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/coverage_all.csv"))
    parser.add_argument("--again", action="store_true", help="also names whose row was made by other code")
    parser.add_argument(
        "--no-values",
        action="store_true",
        help="a quick first look: all on the meta device; a later run goes over some of them with values",
    )
    parser.add_argument("--page", action="store_true", help="write docs/coverage_all.md from the rows, and run nothing")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.cpu, options.memory, options.nice)
    import timm

    from benchmarks import coverage_page

    known = [name for name in timm.list_models() if "knapsack" not in name]
    if not options.page:
        code, before = code_digest(), rows_of(options.out)
        families = list(rows_of(str(ROOT / "benchmarks/coverage.csv")))
        wanted = set(options.names or known)
        todo = [(name, deep) for name, deep in ordered(known, families) if name in wanted]
        todo = [(name, deep and not options.no_values) for name, deep in todo]
        todo = [x for x in todo if options.names or is_open(before.get(x[0]), x[1], options.again and code)]
        run(todo, options, code)
    rows = rows_of(options.out)
    if options.out == parser.get_default("out"):
        (ROOT / "docs/coverage_all.md").write_text(coverage_page.page(list(rows.values()), len(known), code_digest()))
    print(coverage_page.summary(list(rows.values()), len(known)))


def is_open(row: dict | None, deep: bool, code: str | bool) -> bool:
    """Whether a name must be run: it has no row, none of this code, or values are wanted and were not compared."""
    return row is None or (deep and row["values"] == "no") or bool(code and row["code"] != code)


def run(todo: list[tuple[str, bool]], options, code: str) -> None:
    """Rows of these names, appended as they come."""
    lock, left = threading.Lock(), iter(todo)
    new = not os.path.exists(options.out)
    with open(options.out, "a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        done = 0

        def serve():
            nonlocal done
            worker = Worker(options)
            while True:
                with lock:
                    name, deep = next(left, (None, False))
                if name is None:
                    return worker.stop()
                row = {"code": code, **worker.row(name, deep), "module": module_of(name)}
                with lock:
                    done += 1
                    writer.writerow(row)
                    file.flush()
                    shown = " ".join(
                        str(row.get(key, "")) for key in ("status", "left_50", "removable", "oracle", "cpu_s")
                    )
                    print(f"{done:>5}/{len(todo)} {name:<45} {shown} {row.get('error', '')}", flush=True)

        threads = [threading.Thread(target=serve) for _ in range(options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def module_of(name: str) -> str:
    from timm.models import _registry

    return _registry._model_to_module.get(name, "")


if __name__ == "__main__":
    main()
