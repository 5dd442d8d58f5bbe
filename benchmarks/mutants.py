"""Small changes of the code that decides, one at a time: does a test notice? Prints killed ÷ tried, and who survived.

    python benchmarks/mutants.py --named               # the eight that survived an earlier attack
    python benchmarks/mutants.py --sample 40 --seed 1  # of all that there are
    python benchmarks/mutants.py --room knapsack       # all of one file's: seconds each, of all thirteen hours

A run goes on where the last one stopped: what was tried is in ``benchmarks/results/mutants.jsonl``. A mutant stays
killed as long as the file of the test that killed it is the same, and a survivor survives as long as all its tests are.
The checkout is left alone: mutants live in a copy. Each is tried in a fork of this process, which has imported torch
and timm once.

The tests of a file run once as it is, which tells the lines and the time of each (``.mutants/``). A mutant is tried by
those tests alone that run its line, the quickest first, until one fails; one that takes ten times as long as before
(and half a minute more) has noticed, too. The test that stops at a mutant must pass on the file as it is, or it would
prove nothing. A test that a mutant would need, but that reaches its line in another process or through a cache, is not
tried: such a mutant counts as a survivor.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
LINES = ROOT / ".mutants"
PATIENCE, FACTOR = 30.0, 10.0  # seconds that a test may take besides, and how many times those that it took before
_PASSING: set[str] = set()  # tests that were seen to pass on the files as they are
PRELOADED = ("torch", "timm", "scipy.optimize", "scipy.sparse.csgraph", "pytest", "hypothesis", "accelerate",
             "huggingface_hub", "safetensors.torch")  # fmt: skip
QUIET = ("-p", "no:cacheprovider", "-p", "no:xdist")

# Room → file, and the tests that should notice; the fastest and most likely first.
ROOMS = {
    "knapsack": ("knapsack/exact.py", ["knapsack"]),
    "width search": (
        "pruning/width_search.py",
        [
            "pruning/test_search_edges.py",
            "pruning/test_width_search.py",
            "pruning/test_pruning.py",
        ],
    ),
    "slim": ("slim/cutting.py", ["slim", "pruning/test_pruning.py"]),
    "attributes": ("slim/attributes.py", ["slim", "channels/test_channel_groups.py"]),
    "grouping": (
        "channels/grouping.py",
        [
            "channels/test_group_parts.py",
            "channels/test_channel_groups.py",
            "channels/test_channel_rules.py",
            "channels/test_shared_parameters.py",
            "costs/test_activations.py",
        ],
    ),
    "verification": (
        "channels/dry_run.py",
        ["channels/test_draws.py", "channels/test_dry_run.py", "channels/test_channel_groups.py"],
    ),
    "values": (
        "channels/value_check.py",
        [
            "channels/test_draws.py",
            "channels/test_value_check.py",
            "channels/test_way_of_verifying.py",
            "pruning/test_chosen_widths.py",
        ],
    ),
    "ridge": (
        "recovery/ridge.py",
        [
            "recovery/test_ridge_oracle.py",
            "recovery/test_ridge.py",
            "recovery/test_singular_inputs.py",
            "recovery/test_recovery.py",
        ],
    ),
    "distillation": (
        "training/distillation.py",
        "training/losses.py",
        [
            "training/test_distillation_edges.py",
            "training/test_distillation.py",
        ],
    ),
    "checkpoints": (
        "training/checkpoints.py",
        [
            "training/test_checkpoint_edges.py",
            "training/test_replacing_checkpoints.py",
            "training/test_checkpoints.py",
            "training/test_guards.py",
        ],
    ),
    "files": (
        "files/atomic.py",
        [
            "files/test_atomic_edges.py",
            "files/test_atomic_folders.py",
            "files/test_atomic.py",
        ],
    ),
    "effort": (
        "models/effort.py",
        [
            "models/test_effort_edges.py",
            "models/test_effort.py",
            "models/test_foreign_config.py",
        ],
    ),
    "hub": (
        "hub/saving.py",
        [
            "hub/test_saving_edges.py",
            "hub/test_config_json.py",
            "hub/test_hub.py",
        ],
    ),
}

# Files of few decisions, which are not drawn from unless --room names them.
MORE_ROOMS = {"saved model": ("hub/verification.py", ["hub/test_hub.py"])}
ALL_ROOMS = ROOMS | MORE_ROOMS

# What survived once: room, the text (it stands once in the file), and what it becomes.
NAMED = [
    ("width search", "return there if np.abs(there - here).max() <= 1 else (here + there) / 2", "return there"),
    ("slim", "if attribute.at(sizes) != attribute.at(groups.sizes):",
     "if abs(attribute.at(sizes) - attribute.at(groups.sizes)) > 1:"),
    ("knapsack", "self.gap = worth * part + fee * self.spare", "self.gap = worth * part - fee * self.spare"),
    ("saved model", "if not torch.equal(tensor, state[name].to(tensor.dtype)):", "if False:"),
    ("effort", "if any(now > most for now, most in zip(self.effort, self.limit, strict=True)):", "if False:"),
    ("verification", "if len(left) != len(slim) or (left[known] != unit[slim][known]).any():", "if False:"),
    ("files", "        flush(new)\n        os.replace(new, path)\n", "        os.replace(new, path)\n"),
    ("checkpoints", 'if not isinstance(state.get("files"), dict):', "if False:"),
]  # fmt: skip

# Survivors that no test can tell from the code as it is, or none should: room and change (and a part of its line, where
# the change alone says too little), and why.
EXPLAINED = {
    ("width search", "40 → 41"): "the most rounds there may be: the search ends long before, and one more is no worse",
    ("width search", "alone.value > value → GtE"): "two choices that are worth the same: either is right",
    ("knapsack", "40 → 41"): "the most fees that are tried: more than it takes, and one more is no worse",
    ("knapsack", "worth > 0 → GtE"): "at a worth of exactly 0 the bound holds as well",
    ("verification", "group.size > 1 → GtE"): "a group of one unit would only be tried more often",
    (
        "knapsack",
        "trial.slope * towards < 0 → LtE",
    ): "at a slope of exactly 0 the fee is the best: the search ends",
    ("knapsack", "1.0 → 2.0", "towards = "): "the sign alone is used",
    ("knapsack", "1 → 2", "prepend=-1"): "any number that is no class and side will do",
    ("verification", "1 → 2", "gone = np.zeros("): "an array one longer than it need be",
    ("verification", "0 → 1", "gone = np.zeros("): "there is always a component, so the least size is never asked",
    ("verification", "1 → 2", "unit = np.full("): "any number below 0 is no unit",
    ("grouping", "1 → 2", "group_of = np.full("): "any number below 0 is no group",
    ("values", "0 → 1", "def _run("): "any seed will do, as long as both networks have the same",
    ("values", "draw + i → Sub"): "neighbours are drawn in different ways all the same, and each in all",
    ("effort", "self.calls > self.limit.calls → GtE"): "one call earlier it is looked at and found to be allowed",
    ("effort", "without super().__init__()"): "torch's own does nothing",
    ("checkpoints", "20 → 21"): "files are read in larger blocks: the checksum is the same",
}

COPIED = ("timm_knapsack", "tests", "benchmarks", "recipes", "model_cards", "docs", "pyproject.toml", "README.md")
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


@dataclass
class Mutant:
    """A change of one room's file; its text is made when it is wanted: there are more than a thousand."""

    room: str
    what: str
    lines: range
    make: Callable[[], str]

    @cached_property
    def text(self) -> str:
        return self.make()

    @cached_property
    def key(self) -> str:
        return _digest(self.text.encode())


def mutants(room: str) -> Iterator[Mutant]:
    """All of a file, in its order."""
    tree = ast.parse(_source(room))
    for number, node in enumerate(ast.walk(tree)):
        for turn, (what, _) in enumerate(_changes(node)):
            part = node.test if isinstance(node, ast.If) else node
            lines = range(part.lineno, part.end_lineno + 1)
            yield Mutant(room, f"line {node.lineno}: {what}", lines, partial(_mutated, tree, number, turn))


def _mutated(tree: ast.AST, number: int, turn: int) -> str:
    mutated = copy.deepcopy(tree)
    node = next(itertools.islice(ast.walk(mutated), number, None))
    _, change = list(_changes(node))[turn]
    change(node)
    return ast.unparse(ast.fix_missing_locations(mutated))


def _source(room: str) -> str:
    return (ROOT / "timm_knapsack" / ALL_ROOMS[room][0]).read_text()


@cache
def _tests_of(room: str) -> tuple[str, ...]:
    """The files of a room's tests."""
    paths = [ROOT / "tests" / place for place in ALL_ROOMS[room][1]]
    files = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return tuple(str(file.relative_to(ROOT)) for file in files)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:20]


@cache
def _digest_of(*files: str) -> str:
    return _digest(*((ROOT / file).read_bytes() for file in files))


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        new = COMPARED[type(node.ops[0])]
        yield f"{ast.unparse(node)} → {new.__name__}", lambda n: n.ops.__setitem__(0, new())
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        operator = COMPUTED[type(node.op)]
        yield f"{ast.unparse(node)} → {operator.__name__}", lambda n: setattr(n, "op", operator())
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{ast.unparse(node)} → {other.__name__}", lambda n: setattr(n, "op", other())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield f"{node.value} → {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.If):
        yield f"if {ast.unparse(node.test)} → never", lambda n: setattr(n, "test", ast.Constant(False))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"without {ast.unparse(node)}", lambda n: setattr(n, "value", ast.Constant(None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=ALL_ROOMS, action="append")
    parser.add_argument("--sample", type=int, help="so many, drawn by --seed, the files by turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--named", action="store_true", help="those that survived an earlier attack")
    options = parser.parse_args()
    rooms = options.room or list(ALL_ROOMS if options.named else ROOMS)
    chosen = list(_named(rooms)) if options.named else [mutant for room in rooms for mutant in mutants(room)]
    if options.sample is not None:
        chosen = _by_turns(chosen, options.seed)[: options.sample]
    rows = _rows()
    known = {mutant.key: rows[mutant.key]["outcome"] for mutant in chosen if _holds(mutant, rows.get(mutant.key))}
    print(f"{len(chosen)} mutants of {len(rooms)} files, {len(known)} tried before", flush=True)
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        for part in COPIED:
            source = ROOT / part
            shutil.copytree(source, Path(folder, part)) if source.is_dir() else shutil.copy(source, folder)
        for mutant in chosen:
            room, what, key = mutant.room, mutant.what, mutant.key
            if key not in known:
                began = time.monotonic()
                known[key], test = _try(Path(folder), mutant)
                row = {"key": key, "room": room, "what": what, "outcome": known[key], "test": test}
                row["tests"] = _digest_of(*([test.partition("::")[0]] if test else _tests_of(room)))
                with open(RESULTS, "a") as file:
                    file.write(json.dumps({**row, "seconds": round(time.monotonic() - began)}) + "\n")
            why = _explained(mutant) if known[key] == "survived" else None
            print(f"{known[key]:<9} {room}, {what}{f' ({why})' if why else ''}", flush=True)
    killed = sum(known[mutant.key] != "survived" for mutant in chosen)
    alike = sum(known[mutant.key] == "survived" and _explained(mutant) is not None for mutant in chosen)
    print(
        f"killed {killed} of {len(chosen)} tried: {killed / max(1, len(chosen)):.1%}; {alike} survivors are explained"
    )
    return int(killed + alike < len(chosen))


def _explained(mutant: Mutant) -> str | None:
    """Why no test tells a survivor from the code as it is, if that is known."""
    line = _source(mutant.room).splitlines()[mutant.lines[0] - 1]
    change = mutant.room, mutant.what.partition(": ")[2]
    for (*place, part), why in ((key if len(key) == 3 else (*key, ""), why) for key, why in EXPLAINED.items()):
        if tuple(place) == change and part in line:
            return why
    return None


def _rows() -> dict[str, dict]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def _holds(mutant: Mutant, row: dict | None) -> bool:
    """Whether what an earlier run found is so still."""
    if row is None:
        return False
    files = [row["test"].partition("::")[0]] if row["test"] else _tests_of(mutant.room)
    return all((ROOT / file).exists() for file in files) and row.get("tests") == _digest_of(*files)


def _by_turns(chosen: list[Mutant], seed: int) -> list[Mutant]:
    """One of each file at random, then another of each: a sample is not all of the largest file."""
    rooms: dict[str, list] = {}
    for mutant in random.Random(seed).sample(chosen, len(chosen)):
        rooms.setdefault(mutant.room, []).append(mutant)
    turns = itertools.zip_longest(*(rooms[room] for room in ALL_ROOMS if room in rooms))
    return [mutant for turn in turns for mutant in turn if mutant is not None]


def _named(rooms: list[str]) -> Iterator[Mutant]:
    for room, old, new in NAMED:
        source = _source(room)
        if source.count(old) != 1:
            raise SystemExit(
                f"{ALL_ROOMS[room][0]} has {source.count(old)} times {old!r}, expected once: put NAMED right"
            )
        if room in rooms:
            what = f"{old.strip().splitlines()[0]} → {new.strip()}"
            first = source[: source.index(old)].count("\n") + 1
            yield Mutant(
                room, what, range(first, first + old.rstrip().count("\n") + 1), partial(source.replace, old, new)
            )


def _preload() -> None:
    """What all of them import. Nothing of this package: each imports its own."""
    sys.dont_write_bytecode = True  # a file's time in seconds does not tell two mutants apart
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    for name in PRELOADED:
        importlib.import_module(name)
    own = [name for name in sys.modules if name.partition(".")[0] == "timm_knapsack"]
    if own:
        raise SystemExit(f"{own[0]} was imported before it could be mutated")


def _try(folder: Path, mutant: Mutant) -> tuple[str, str]:
    """The outcome, and the test that noticed."""
    plan = _plan(folder, mutant)
    if not plan:
        return "survived", ""
    target = folder / "timm_knapsack" / ALL_ROOMS[mutant.room][0]
    whole = target.read_text()
    target.write_text(mutant.text)
    try:
        outcome, test = _tested(folder, plan)
    finally:
        target.write_text(whole)
    if test and test not in _PASSING:
        if _tested(folder, {test: plan.get(test, PATIENCE)}) != ("survived", ""):
            raise SystemExit(f"{mutant.room}: {test} fails on the file as it is")
        _PASSING.add(test)
    return outcome, test


def _plan(folder: Path, mutant: Mutant) -> dict[str, float]:
    """The tests that run the mutant's lines and the seconds each took, the quickest first."""
    lines, reached = set(mutant.lines), {}
    for file in _tests_of(mutant.room):
        found = _lines_of_tests(folder, mutant.room, file)
        everywhere = lines & set(found["import"])
        for test, row in found["tests"].items():
            if row["lines"] and (everywhere or lines & set(row["lines"])):
                reached[test] = row["seconds"]
    return dict(sorted(reached.items(), key=lambda item: item[1]))


@cache
def _lines_of_tests(folder: Path, room: str, file: str) -> dict:
    """What each test of a file runs of the room's file, in a fork, or as an earlier run of the same files has found."""
    result = LINES / f"{_digest(_source(room).encode(), _digest_of(file).encode())}.json"
    if not result.exists():
        LINES.mkdir(exist_ok=True)
        print(f"{room}: which test of {file} runs which line", flush=True)
        found = folder / "lines.json"
        plugin = _Lines(str(folder / "timm_knapsack" / ALL_ROOMS[room][0]), found)
        _wait(_forked(folder, [file], plugin, "not browser"))
        shutil.move(found, result)
    return json.loads(result.read_text())


class _Lines:
    """A plugin of pytest: the lines of one file that each test runs, and its time.

    What a test sets up counts for all tests of its module: a fixture may serve them all.
    """

    def __init__(self, file: str, result: Path):
        self.file, self.result = file, result
        self.now: set[int] = set()
        self.at_import = self.now
        self.tests: dict[str, dict] = {}
        self.set_up: dict[str, set[int]] = {}

    def start(self):
        sys.settrace(self.called)
        threading.settrace(self.called)

    def called(self, frame, event, argument):
        return self.line if frame.f_code.co_filename == self.file else None

    def line(self, frame, event, argument):
        if event == "line":
            self.now.add(frame.f_lineno)
        return self.line

    def pytest_runtest_logstart(self, nodeid):
        self.now = set()
        self.tests[nodeid] = {"seconds": 0.0, "passed": True, "lines": self.now}

    def pytest_runtest_logreport(self, report):
        row = self.tests[report.nodeid]
        row["seconds"] += report.duration
        row["passed"] &= report.passed
        if report.when == "setup":
            self.set_up.setdefault(report.nodeid.partition("::")[0], set()).update(self.now)

    def pytest_sessionfinish(self):
        sys.settrace(None)
        rows = {
            test: {"seconds": row["seconds"], "lines": sorted(row["lines"] | self.set_up[test.partition("::")[0]])}
            for test, row in self.tests.items()
            if row["passed"]
        }
        self.result.write_text(json.dumps({"import": sorted(self.at_import), "tests": rows}))


class _Planned:
    """A plugin of pytest: these tests in this order, each in its time; the one that fails is written down."""

    def __init__(self, plan: dict[str, float], file: Path):
        self.plan, self.file = plan, file

    def start(self):
        pass

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test] for test in self.plan if test in by_name]

    def pytest_runtest_logstart(self, nodeid):
        self.file.write_text(nodeid)  # if it ends this process
        self.limit(PATIENCE + FACTOR * self.plan[nodeid])

    def pytest_runtest_logfinish(self):
        self.limit(0)

    def limit(self, seconds: float) -> None:
        """Ends this process, if it is too slow: of CPU time, since a busy machine is no mutant; or if it waits."""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 20 * seconds)


def _tested(folder: Path, plan: dict[str, float]) -> tuple[str, str]:
    """Run these tests until one fails: the outcome, and which."""
    last = folder / "last_test"
    last.unlink(missing_ok=True)
    files = list(dict.fromkeys(test.partition("::")[0] for test in plan))
    code = _wait(_forked(folder, files, _Planned(plan, last), "not browser"))
    if code == 0:
        return "survived", ""
    test = last.read_text() if last.exists() else next(iter(plan))  # it can't even be imported
    return ("killed, by time" if code in (-signal.SIGALRM, -signal.SIGPROF) else "killed"), test


def _forked(folder: Path, tests: list[str], plugin: object, marks: str) -> int:
    """Start pytest in a fork of this process."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        sys.path[:0] = [str(folder)]
        os.environ["PYTHONPATH"] = str(folder)
        options = ["-x"] if isinstance(plugin, _Planned) else []
        plugin.start()
        os._exit(int(pytest.main([*options, "-q", *QUIET, "-m", marks, *tests], plugins=[plugin])))
    return child


def _wait(child: int) -> int:
    """Its exit code; what it has started ends with it."""
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
