"""Damaged files against the promise: whatever is wrong, one line of a KnapsackError, under a second and 200 MB.

    python tests/fuzz/attack.py                              # 20 000 of each kind: `make fuzz`
    python tests/fuzz/attack.py --kind recipes --mutations 300
    python tests/fuzz/attack.py --kind recipes --only 17     # one of them, with its trace
    python tests/fuzz/attack.py --log night.jsonl            # a run that was stopped goes on where it was

A mutation is a number: the same one damages the same file in the same way. Those that once broke the promise are kept
in ``kept_seeds.json``, which the test suite tries besides the first 300 (``--keep`` adds what fails now).
"""

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import timm_knapsack  # noqa: E402, F401  (before timm)
from timm_knapsack.errors import KnapsackError  # noqa: E402

KEPT = Path(__file__).with_name("kept_seeds.json")
MAX_SECONDS = 1.0
MAX_BYTES = 200 * 2**20
MAX_LENGTH = 1000
PORTION = 500  # so many are tried, then written to the log: all that a stopped run loses


@dataclass
class Outcome:
    """What an attack came to: how many files were accepted, refused, and broke the promise, with how."""

    tried: int = 0
    accepted: int = 0
    refused: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    slowest: float = 0.0
    most_memory: int = 0

    def add(self, other: "Outcome") -> None:
        """The outcome of more numbers."""
        self.tried, self.accepted = self.tried + other.tried, self.accepted + other.accepted
        self.refused, self.failures = self.refused + other.refused, {**self.failures, **other.failures}
        self.slowest, self.most_memory = max(self.slowest, other.slowest), max(self.most_memory, other.most_memory)


class TooLong(BaseException):
    pass


def attack(kind: str, numbers: Iterable[int], debug: bool = False) -> Outcome:
    """Damage and use a file once for each number."""
    from targets import TARGETS

    target, outcome = TARGETS[kind], Outcome()
    with tempfile.TemporaryDirectory() as folder, _quiet(debug):
        path, more = target.prepare(Path(folder))
        whole = path.read_bytes()
        (Path(folder) / "state.whole").write_bytes(whole)
        for number in (1, 2, 4):  # imports, caches and pools are not the file's doing; and a whole file is accepted
            target.use(path, more, number)
        for number in numbers:
            path.write_bytes(target.damage(random.Random(f"{kind}/{number}"), whole))
            failure = _try(target, path, more, number, outcome, debug)
            if failure:
                outcome.failures[number] = failure
            path.write_bytes(whole)
    return outcome


def _try(target, path: Path, more, number: int, outcome: Outcome, debug: bool) -> str | None:
    outcome.tried += 1
    for second_time in (False, True):
        memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            with _limit(20 * MAX_SECONDS):
                target.use(path, more, number)
            outcome.accepted += not second_time
            problem = None
        except KnapsackError as error:
            outcome.refused += not second_time
            problem = _problem_of(str(error))
        except TooLong:
            return f"took more than {20 * MAX_SECONDS:.0f} s"
        except Exception as error:
            if debug:
                traceback.print_exc()
            return f"{type(error).__module__}.{type(error).__name__}: {str(error)[:150]}"
        seconds = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
        if seconds <= MAX_SECONDS or second_time:  # a collection of garbage may have fallen into the first
            break
    outcome.slowest, outcome.most_memory = max(outcome.slowest, seconds), max(outcome.most_memory, grown)
    if problem:
        return problem
    if seconds > MAX_SECONDS:
        return f"took {seconds:.1f} s"
    return f"took {grown / 2**20:.0f} MB" if grown > MAX_BYTES else None


def _problem_of(message: str) -> str | None:
    if not message.strip():
        return "an empty message"
    if not message.isprintable():
        return f"not one printable line: {message[:150]!r}"
    return f"{len(message)} characters: {message[:80]}" if len(message) > MAX_LENGTH else None


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """CPU seconds, so that a busy machine is not taken for a slow file."""

    def stop(*_):
        raise TooLong

    former = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        yield


def attack_all(kinds: Iterable[str], first: int, count: int, log: Path | None) -> dict[str, Outcome]:
    """The outcomes of ``count`` numbers of each kind, by turns, so that a run that is stopped has tried all kinds.

    Portions that ``log`` knows of the same code are not tried again.
    """
    known, code = {}, _digest_of_code()
    if log is not None and log.exists():
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        same = [row for row in rows if row["code"] == code]
        known = {(row["kind"], row["first"], row["outcome"]["tried"]): row["outcome"] for row in same}
    outcomes = {kind: Outcome() for kind in kinds}
    for start in range(first, first + count, PORTION):
        size = min(PORTION, first + count - start)
        for kind, outcome in outcomes.items():
            row = known.get((kind, start, size))
            if row is None:
                found = attack(kind, range(start, start + size))
                if log is not None:
                    row = {"code": code, "kind": kind, "first": start, "outcome": asdict(found)}
                    with open(log, "a") as file:
                        file.write(json.dumps(row) + "\n")
            else:
                found = Outcome(**{**row, "failures": {int(number): why for number, why in row["failures"].items()}})
            outcome.add(found)
    return outcomes


def _digest_of_code() -> str:
    root = Path(__file__).parents[2]
    files = [*(root / "timm_knapsack").rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def kept_seeds() -> dict[str, list[int]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def main() -> int:
    import torch
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=TARGETS, action="append")
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", help="try this number alone and show the trace")
    parser.add_argument("--log", type=Path, help="what was tried is written here, and not tried again on the same code")
    parser.add_argument("--keep", action="store_true", help="add what fails to kept_seeds.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        outcomes = {kind: attack(kind, options.only, debug=True) for kind in options.kind or TARGETS}
    else:
        outcomes = attack_all(options.kind or TARGETS, options.start, options.mutations, options.log)
    print(f"{'kind':<15} {'tried':>6} {'accepted':>8} {'refused':>8} {'failed':>7} {'slowest':>9} {'memory':>8}")
    failed = 0
    for kind, found in outcomes.items():
        failed += len(found.failures)
        print(
            f"{kind:<15} {found.tried:>6} {found.accepted:>8} {found.refused:>8} {len(found.failures):>7} "
            f"{found.slowest:>7.2f} s {found.most_memory / 2**20:>5.0f} MB", flush=True,
        )  # fmt: skip
        for failure, count in Counter(text[:100] for text in found.failures.values()).most_common(12):
            example = next(n for n, text in found.failures.items() if text.startswith(failure))
            print(f"    {count:>5} × {failure!r}, such as {example}")
        if options.keep and found.failures:
            kept = kept_seeds()
            kept[kind] = sorted({*kept.get(kind, []), *list(found.failures)[:20]})
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
