"""300 damaged files of each kind, and those that once broke something: only KnapsackErrors, one line, fast, small.

`make fuzz` tries 20 000 of each. The same numbers damage the same files, so a red run is red again.
"""

import resource
import time

import attack
import pytest
import targets
from targets import TARGETS, Target

from timm_knapsack.errors import KnapsackError


@pytest.mark.parametrize("kind", TARGETS)
def test_damaged_files_are_refused_or_read(kind, monkeypatch):
    monkeypatch.setattr(targets.charts, "find_spec", targets.charts.find_spec)  # put back after the test
    numbers = sorted({*range(300), *attack.kept_seeds().get(kind, ())})
    outcome = attack.attack(kind, numbers)
    assert outcome.failures == {}
    assert outcome.tried == len(numbers) and outcome.refused > 0.2 * len(numbers)  # the mutations do damage
    assert outcome.accepted > 0  # and do not make everything unreadable at once


class Multiline(KnapsackError):
    def __str__(self):
        return "two\nlines"


class Long(KnapsackError):
    def __str__(self):
        return "a" * 2000


def spin():
    began = time.process_time()
    while time.process_time() - began < 1.2:
        pass


def raising(error):
    def use():
        raise error

    return use


BROKEN = {
    "a raw error": (raising(KeyError("a")), "builtins.KeyError"),
    "two lines": (raising(Multiline()), "not one printable line"),
    "too long": (raising(Long()), "2000 characters"),
    "nothing said": (raising(KnapsackError("")), "an empty message"),
    "slow": (spin, "took 1"),
    "large": (lambda: bytearray(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 2**29), "MB"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_attack_notices_each_broken_promise(case, monkeypatch):
    broken, words = BROKEN[case]
    if case == "large":  # above an earlier peak of this process, which may be high: that takes its time
        monkeypatch.setattr(attack, "MAX_SECONDS", 60.0)

    def prepare(folder):
        (folder / "file").write_bytes(b"whole")
        return folder / "file", None

    def use(path, more, number):
        if path.read_bytes() != b"whole":
            broken()

    monkeypatch.setitem(TARGETS, "broken", Target(prepare, lambda rng, data: b"damaged", use))
    assert words in attack.attack("broken", [0]).failures[0]


def test_the_same_number_damages_in_the_same_way():
    import random

    from mutations import damaged_json

    def text(number):
        return damaged_json(random.Random(f"a/{number}"), b'{"a": [1, 2, {"b": "c"}], "d": 3.5}')

    assert [text(n) for n in range(50)] == [text(n) for n in range(50)]
    assert len({text(n) for n in range(50)}) > 40
