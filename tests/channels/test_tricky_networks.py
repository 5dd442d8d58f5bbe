"""A hundred random networks from the grammar of benchmarks/tricky_nets.py; `make fuzz-networks` runs 2000."""

import pytest

from benchmarks.fuzz_networks import TOLERANCE, compared
from benchmarks.tricky_nets import TRICKS, tricky_net

SEEDS = range(100)


@pytest.mark.parametrize("first", SEEDS[::10])
def test_no_network_comes_out_silently_different(first):
    for seed in range(first, first + 10):
        outcome = compared(seed)
        assert outcome.difference < TOLERANCE, f"seed {seed}: {outcome.net}: {outcome.groups.by_name}"


def test_the_same_check_fails_where_values_are_not_compared():
    wrong = [seed for seed in (1, 6, 9, 15) if compared(seed, verify="shapes").difference > 1e-3]
    assert len(wrong) >= 3


def test_every_trick_is_among_the_hundred():
    drawn = {type(trick).__name__ for seed in SEEDS for trick in tricky_net(seed).tricks}
    assert drawn == set(TRICKS)


def test_a_norm_that_loses_all_its_groups_leaves_the_others_compared():
    """Seed 441: the whole network was verified by shapes because one norm could not be followed."""
    outcome = compared(441)
    assert outcome.groups.verified == "values" and outcome.difference < TOLERANCE
