"""Budgets: fractions and absolute numbers, several at once, and what is refused in words."""

import dataclasses

import pytest

from timm_knapsack.errors import BudgetError
from timm_knapsack.pruning.budget import Budget

TABLE = object()  # stands for a LatencyTable, which a budget only carries


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        (Budget(macs=0.5), {"macs": 2e9}),
        (Budget(macs=1), {"macs": 4e9}),
        (Budget(macs=1.5e9), {"macs": 1.5e9}),
        (Budget(macs=1_500_000_000), {"macs": 1.5e9}),
        (Budget(macs=9e9), {"macs": 9e9}),
        (Budget(params=0.25), {"params": 5e6}),
        (Budget(macs=0.6, params=1e7), {"macs": 2.4e9, "params": 1e7}),
        (Budget(latency=0.5, table=TABLE), {"latency": 0.01}),
        (Budget(latency="12ms", table=TABLE), {"latency": 0.012}),
        (Budget(latency="1.5e3us", table=TABLE), {"latency": 0.0015}),
        (Budget(latency=" 2 s ", table=TABLE, macs=0.5), {"macs": 2e9, "latency": 2.0}),
    ],
)
def test_limits_are_fractions_of_the_original_or_absolute(asked, limits):
    original = {"macs": 4e9, "params": 2e7, "latency": 0.02}
    assert asked.limits(original) == pytest.approx(limits, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"macs": 10**400}, "budget macs=1000.* is not a number"),
        ({}, "at least one of macs, params, latency and activations"),
        ({"macs": 0}, "leaves nothing"),
        ({"macs": -0.5}, "leaves nothing"),
        ({"params": 0.0}, "params=0.0 leaves nothing"),
        ({"macs": 50}, "a fraction is at most 1"),
        ({"macs": 1.5}, "a fraction is at most 1"),
        ({"macs": float("nan")}, "not a number"),
        ({"macs": float("inf")}, "not a number"),
        ({"macs": "0.5"}, "not a number"),
        ({"macs": True}, "not a number"),
        ({"latency": 0.5}, "needs a table of measured times"),
        ({"latency": 12, "table": TABLE}, "write a time as '12ms'"),
        ({"latency": "fast", "table": TABLE}, "or a time such as '12ms'"),
        ({"latency": "0ms", "table": TABLE}, "or a time such as '12ms'"),
        ({"latency": "1.2.3ms", "table": TABLE}, "or a time such as '12ms'"),
    ],
)
def test_impossible_budgets_are_refused(fields, words):
    with pytest.raises(BudgetError, match=words):
        Budget(**fields)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("macs=0.5", Budget(macs=0.5)),
        (" macs = 0.5 , params=0.6 ", Budget(macs=0.5, params=0.6)),
        ("macs=2.05e9", Budget(macs=2.05e9)),
    ],
)
def test_command_line_text(text, expected):
    assert Budget.parse(text) == expected


def test_a_time_keeps_its_unit():
    parsed = Budget.parse("latency=12ms", TABLE)
    assert parsed.latency == "12ms" and parsed.table is TABLE
    assert Budget.parse("macs=0.5", TABLE).table is None


@pytest.mark.parametrize("text", ["", "0.5", "flops=0.5", "macs", "macs=half", "macs=0.5,,", "macs=0.5;params=0.5"])
def test_text_that_is_no_budget_is_refused(text):
    with pytest.raises(BudgetError, match="budget"):
        Budget.parse(text)


def test_asked_says_what_was_given_and_nothing_else():
    assert Budget(macs=0.5).asked == {"macs": 0.5}
    assert repr(Budget(latency="9ms", table=TABLE, params=1e6)) == "Budget(params=1000000.0, latency='9ms')"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(macs=0.5).macs = 0.6
