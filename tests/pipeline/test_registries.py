"""A criterion and a cost registered from outside: in Python, on the command line, in a recipe, on page and card."""

import json
import shlex
from pathlib import Path

import pytest
import timm
import torch
import toys
import yaml
from forks import timm_knapsack

import timm_knapsack as tk
from timm_knapsack.cli import app
from timm_knapsack.costs.kinds import COSTS
from timm_knapsack.errors import BudgetError, KnapsackError, RecipeError, ScoreError
from timm_knapsack.pipeline.recipe import Recipe
from timm_knapsack.pipeline.rehearsal import dry_run
from timm_knapsack.reports.page import write_report
from timm_knapsack.values.criteria import CRITERIA

TOYS = Path(toys.__file__)


@pytest.fixture
def registered():
    toys.register()
    yield
    COSTS.remove("energy")
    CRITERIA.remove("last_first")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20")
    return model, tk.find_channel_groups(model)


def energy_of(groups, counts):
    return 3 + sum(counts) + counts[0]


def test_python(registered, network):
    model, groups = network
    scores = tk.taylor_scores(model, groups, criterion="last_first")
    result = tk.prune(model, scores=scores, budget=tk.Budget(energy=0.5, macs=0.9), groups=groups)
    line = result.report.line("energy")
    whole = energy_of(groups, groups.sizes)
    assert (line.original, line.asked, line.label, line.unit) == (whole, whole / 2, "battery", "J")
    assert line.counted == energy_of(groups, [len(result.keep[g.name]) for g in groups])
    assert whole / 2 - 2 < line.counted <= whole / 2
    for group in groups:  # the last ones stay, as the criterion says
        kept = result.keep[group.name]
        assert kept.tolist() == list(range(group.size - len(kept), group.size))
    assert result.report.scores["criterion"] == "last_first"
    assert result.report.options["budget"] == {"macs": 0.9, "energy": 0.5}


def test_budgets_know_the_new_name(registered):
    assert tk.Budget(energy=0.5).energy == 0.5 and tk.Budget(macs=0.5).energy is None
    assert tk.Budget.parse("energy=40, macs=0.5").limits({"macs": 4e6, "energy": 80}) == {"macs": 2e6, "energy": 40}
    assert hash(tk.Budget(energy=0.5)) == hash(tk.Budget(energy=0.5)) and tk.Budget(energy=0.5) != tk.Budget(macs=0.5)
    with pytest.raises(BudgetError, match=r"budget energi=0\.5: cost 'energi' is not known; did you mean 'energy'"):
        tk.Budget(energi=0.5)


def test_without_it_the_name_is_unknown(network):
    with pytest.raises(BudgetError, match="'energy' is not known"):
        tk.Budget(energy=0.5)
    with pytest.raises(ScoreError, match="'last_first' is not known"):
        tk.taylor_scores(*network, criterion="last_first")


def test_command_line_page_and_card(registered, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "prune cifar_resnet20 --no-pretrained --criterion last_first --budget energy=0.5 --out slim --device cpu"
    with pytest.raises(SystemExit) as end:
        app.main(shlex.split(line))
    out = capsys.readouterr().out
    assert end.value.code == 0 and "battery" in out and " J" in out
    page = write_report("slim")[0].read_text(encoding="utf-8")
    assert "battery" in page and "energy=0.5" in page and "last_first" in page
    card = Path("slim/README.md").read_text(encoding="utf-8")
    assert "| battery, J |" in card
    assert [c["label"] for c in json.loads(Path("slim/record.json").read_text())["pruning"]["costs"]] == [
        "MACs", "parameters", "battery",
    ]  # fmt: skip


def test_a_recipe(registered):
    data = {"name": "toy", "model": {"name": "cifar_resnet20"}, "data": {"source": "images"}}
    recipe = Recipe.from_dict({**data, "budget": {"energy": 0.5}, "score": {"criterion": "last_first"}})
    (line,) = [line for line in dry_run(recipe)["costs"] if line["name"] == "energy"]
    assert line["counted"] <= line["asked"] == line["original"] / 2
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe
    for wrong, words in (
        ({"budget": {"energi": 0.5}}, "did you mean 'energy'"),
        (
            {"budget": {"macs": 0.5}, "score": {"criterion": "last"}},
            "criterion 'last' is not known",
        ),
    ):
        with pytest.raises(RecipeError, match=words):
            Recipe.from_dict({**data, **wrong})


def test_a_plugin_of_the_command_line(tmp_path):
    """In a process of its own, as a user runs it: nothing but ``--plugin`` registers the toys."""
    command = ["prune", "cifar_resnet20", "--no-pretrained", "--out", "slim"]
    command += ["--criterion", "last_first", "--budget", "energy=0.5", "--json", "--device", "cpu"]
    plain = timm_knapsack(command, tmp_path)
    assert plain.returncode == 2 and "cost 'energy' is not known" in plain.stderr
    done = timm_knapsack([*command, "--plugin", str(TOYS)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["costs"][-1]["label"] == "battery"
    lost = timm_knapsack([*command, "--plugin=nowhere.py"], tmp_path)
    assert lost.returncode == 2 and "--plugin nowhere.py can't be imported" in lost.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tk.register_cost(COSTS["macs"]), "cost 'macs' is there already"),
        (lambda: tk.register_criterion(CRITERIA["abs"]), "criterion 'abs' is there already"),
        (lambda: tk.register_cost("energy"), "register_cost takes a CostKind"),
        (lambda: tk.register_criterion("mine"), "register_criterion takes a Criterion"),
        (lambda: tk.register_cost(tk.CostKind("table", "a", "b", make=print)), "can't be called 'table'"),
        (lambda: tk.register_cost(tk.CostKind("my cost", "a", "b", make=print)), "expected a name such as"),
        (lambda: tk.CostKind("c", "a", "b", make=print, always=True), "give a count"),
        (lambda: tk.Criterion("c", ""), "give one of measure, compute and curves"),
        (lambda: tk.Criterion("c", "", needs_gradients=False, measure=print), "needs data for its gradients"),
    ],
)
def test_what_registries_refuse(make, words):
    before = list(COSTS), list(CRITERIA)
    with pytest.raises(KnapsackError, match=words):
        make()
    assert (list(COSTS), list(CRITERIA)) == before


def test_a_cost_must_bear_its_name(network):
    model, groups = network
    wrong = tk.CostKind("wrong", "a", "b", make=lambda model, groups, table: toys.Energy(groups))
    with pytest.raises(BudgetError, match="must give a Cost with this name"):
        wrong.cost(model, groups)


def test_replacing_is_said():
    abs_before = CRITERIA["abs"]
    try:
        mine = tk.register_criterion(tk.Criterion("abs", "mine", measure=lambda w, g: w * g), replace=True)
        assert CRITERIA["abs"] is mine
    finally:
        tk.register_criterion(abs_before, replace=True)


def test_no_cost_or_criterion_is_a_special_case_elsewhere():
    """Outside of their own files, names of costs and criteria are data."""
    package = Path(tk.__file__).parent
    special = ('name == "latency"', '["name"] == "latency"', "budget.latency", '"latency" in asked', "_choices")
    special += ('in ("magnitude", "random")', 'criterion == "', 'in ("macs", "params")')
    found = []
    for path in package.rglob("*.py"):
        inside = path.relative_to(package).as_posix()
        if not inside.startswith("costs/latency/"):
            found += [f"{inside}: {words}" for words in special if words in path.read_text(encoding="utf-8")]
    assert found == []
