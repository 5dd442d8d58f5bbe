"""benchmarks/coverage_all.py without its models: what counts as a hit, which rows stay, and a page that loads."""

import csv

from benchmarks import coverage_all, coverage_page

ROW = {
    **dict.fromkeys(coverage_all.FIELDS, ""),
    "status": "pass",
    "removable": "0.99",
    "frozen": '{"each index becomes a tensor of its own (aten.unbind)": 3, "the model\'s output": 1}',
    "cpu_s": "4",
    "code": "0123abcd",
    **{f"left_{share}": f"0.{share}" for share in (70, 50, 30)},
}


class Groups(list):
    """Units that cost ten MACs each."""

    def macs(self, kept):
        return 10 * sum(kept)


def test_a_budget_is_hit_within_half_a_percent_or_by_the_last_unit_that_fits():
    assert coverage_all.hits(996, 1000) and coverage_all.hits(1000, 1000)
    assert not coverage_all.hits(1001, 1000) and not coverage_all.hits(990, 1000)
    groups = Groups(type("Group", (), {"size": 4}) for _ in range(2))
    assert coverage_all.no_unit_fits(groups, [2, 2], budget=49)
    assert not coverage_all.no_unit_fits(groups, [2, 2], budget=50), "a fifth unit would fit"
    assert not coverage_all.no_unit_fits(groups, [2, 2], budget=39), "four are too many"


def test_reasons_are_counted_without_places_and_sizes():
    one, two = (f"each index becomes a tensor of its own (aten.unbind in blocks.{i}.attn)" for i in range(2))
    assert coverage_all.in_short(one) == coverage_all.in_short(two) == one.replace(" in blocks.0.attn", "")
    failure = "the dry run without some of its channels fails: RuntimeError: shape '[-1, {}]' is invalid for size {}"
    assert coverage_all.in_short(failure.format(6, 2187)) == coverage_all.in_short(failure.format(3, 99))


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, coverage_all.FIELDS)
        writer.writeheader()
        writer.writerows([{**ROW, "model": "a", "status": "crash"}, {**ROW, "model": "b"}, {**ROW, "model": "a"}])
    rows = coverage_all.rows_of(str(path))
    assert {name: row["status"] for name, row in rows.items()} == {"a": "pass", "b": "pass"}
    assert coverage_all.rows_of(str(tmp_path / "none.csv")) == {}


def test_every_name_has_its_turn_once_and_each_kind_comes_first():
    names = [f"net{i}" for i in range(50)] + ["net_b_tiny", "net_b_base", "net_c_10", "net_c_9"]
    turns = coverage_all.ordered(names, ["net7", "gone"])
    assert sorted(name for name, _ in turns) == sorted(names)
    assert [name for name, _ in turns[:3]] == ["net_b_tiny", "net_c_9", "net7"]
    assert 5 <= sum(with_values for _, with_values in turns) <= 6, "a tenth, and the one of the family"
    assert ("net7", True) in turns


def test_the_page_says_how_far_the_sweep_came_and_stays_small():
    rows = [{**ROW, "model": f"a_network_with_a_long_name_{i}", "module": "vision_transformer"} for i in range(1351)]
    page = coverage_page.page(rows, 1400, "0123abcd")
    assert (
        "1351 of the 1400 names" in page and "| 1351 | each index becomes a tensor of its own (aten.unbind) |" in page
    )
    assert len(page.encode()) < 500_000
    assert coverage_page.numbers([{**ROW, "status": "crash", "removable": ""}, ROW], 2)["crash"] == 1


def test_a_name_is_run_again_where_values_or_newer_code_are_wanted():
    shapes, values = ({**ROW, "values": kind} for kind in ("no", "values"))
    assert coverage_all.is_open(None, False, False) and coverage_all.is_open(shapes, True, False)
    assert not coverage_all.is_open(shapes, False, False) and not coverage_all.is_open(values, True, False)
    assert coverage_all.is_open(values, False, "another") and not coverage_all.is_open(values, False, ROW["code"])
