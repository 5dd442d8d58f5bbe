"""prune and sweep: the counted cost of the slim network meets the budget, and everything asked for is kept to."""

import itertools
import json

import pytest
import timm
import torch
from mixed_net import CLASSES, Mixed, batches_of, mixed, mixed_groups
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import timm_knapsack as tk
from timm_knapsack.costs.counted import macs_cost, params_cost
from timm_knapsack.errors import BudgetError, KnapsackError, ScoreError
from timm_knapsack.human_numbers import human
from timm_knapsack.slim.cutting import mask_model

SHAPE = (1, 3, 32, 32)


class Net(nn.Module):
    """A residual network with a squeeze of its own: small, and with enough channels to meet a budget closely."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.convs1, self.bns1 = self._layers(32, 48), nn.ModuleList(nn.BatchNorm2d(48) for _ in range(3))
        self.convs2, self.bns2 = self._layers(48, 32), nn.ModuleList(nn.BatchNorm2d(32) for _ in range(3))
        self.squeeze = nn.Conv2d(32, 64, 1)
        self.fc = nn.Linear(64, 10)

    @staticmethod
    def _layers(inputs, outputs):
        return nn.ModuleList(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        for conv1, bn1, conv2, bn2 in zip(self.convs1, self.bns1, self.convs2, self.bns2, strict=True):
            x = (x + bn2(conv2(bn1(conv1(x)).relu()))).relu()
        return self.fc(self.squeeze(x).relu().mean((2, 3)))


GROUPS = {"stem": 32, "convs1.0": 48, "convs1.1": 48, "convs1.2": 48, "squeeze": 64}


class Case:
    """A model with its groups and scores, made once."""

    def __init__(self, model, shape):
        self.model, self.shape = model.eval(), shape
        self.groups = tk.find_channel_groups(model, torch.empty(shape))
        generator = torch.Generator().manual_seed(5)
        self.scores = tk.Scores(
            {g.name: torch.randn(g.size, generator=generator).exp().double() for g in self.groups}, criterion="made up"
        )

    def prune(self, budget, **options):
        return tk.prune(self.model, scores=self.scores, groups=self.groups, budget=budget, **options)

    def macs(self, model=None):
        """What torch itself counts, not what we predict."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            (model or self.model).eval()(torch.zeros(self.shape))
        return counter.get_total_flops() // 2

    def params(self, model=None):
        return sum(parameter.numel() for parameter in (model or self.model).parameters())


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    return Case(Net(), SHAPE)


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return Case(timm.create_model("resnet10t", num_classes=10), (1, 3, 64, 64))


def check_budget(counted, limit, smallest_step):
    """At or under the limit, and within 0.5 % or one unit of it."""
    assert counted <= limit, "above the budget"
    assert counted >= 0.995 * limit or limit - counted < smallest_step, "far below the budget"


def one_unit(case, result, cost):
    counts = [len(result.keep[group.name]) for group in case.groups]
    free = [(s, n) for s, n, group in zip(cost.marginal(counts), counts, case.groups, strict=True) if n < group.size]
    return min(slope for slope, _ in free)


# ---- budgets ----------------------------------------------------------------------------------------------------


def test_groups_of_the_net(case):
    assert {group.name: group.size for group in case.groups} == GROUPS


@pytest.mark.parametrize("fraction", [0.9, 0.7, 0.5, 0.3, 0.1])
def test_a_fraction_of_the_macs(case, fraction):
    result = case.prune(tk.Budget(macs=fraction))
    counted = case.macs(result.model)
    check_budget(counted, fraction * case.macs(), one_unit(case, result, macs_cost(case.groups)))
    line = result.report.line("macs")
    assert (line.original, line.counted, line.asked) == (case.macs(), counted, fraction * case.macs())


def test_an_absolute_number_is_the_fraction_it_makes(case):
    limit = round(case.macs() * 0.5)
    absolute, fraction = case.prune(tk.Budget(macs=limit)), case.prune(tk.Budget(macs=limit / case.macs()))
    assert absolute.report.line("macs").asked == limit
    assert same_keep(absolute, fraction)


@pytest.mark.parametrize("budget", [{"params": 0.5}, {"params": 20_000}])
def test_parameters(case, budget):
    result = case.prune(tk.Budget(**budget))
    limit = case.params() * 0.5 if budget["params"] < 1 else 20_000
    check_budget(case.params(result.model), limit, one_unit(case, result, params_cost(case.groups, case.model)))


@pytest.mark.parametrize(("macs", "params"), [(0.5, 0.5), (0.9, 0.3), (0.3, 0.9), (0.6, 0.55)])
def test_macs_and_parameters_at_once(case, macs, params):
    result = case.prune(tk.Budget(macs=macs, params=params))
    used = case.macs(result.model) / (macs * case.macs()), case.params(result.model) / (params * case.params())
    assert max(used) <= 1
    costs = {macs_cost(case.groups): macs * case.macs(), params_cost(case.groups, case.model): params * case.params()}
    for name, size in GROUPS.items():  # within one unit: one more of any group would not have fitted
        more = [len(result.keep[group.name]) + (group.name == name) for group in case.groups]
        assert len(result.keep[name]) == size or any(cost.at(more) > limit for cost, limit in costs.items())
    assert result.report.line("params").asked == pytest.approx(params * case.params())


def test_timm_model_within_the_budget(resnet):
    original = tk.count_macs(resnet.model)
    assert original != resnet.macs()  # the budget is for the model's own input size, not for ours
    groups = tk.find_channel_groups(resnet.model)
    result = tk.prune(resnet.model, scores=resnet.scores, groups=groups, budget=tk.Budget(macs=0.4))
    check_budget(tk.count_macs(result.model), 0.4 * original, 0)


def test_checks_of_the_budget_can_fail():
    for counted in (101, 98):
        with pytest.raises(AssertionError):
            check_budget(counted, 100, 1)
    check_budget(98, 100, 3)


def test_a_budget_of_everything_keeps_everything(case):
    for budget in (tk.Budget(macs=1.0), tk.Budget(macs=1e15), tk.Budget(params=1, macs=1)):
        result = case.prune(budget)
        assert {name: len(kept) for name, kept in result.keep.items()} == GROUPS
        assert result.report.value == pytest.approx(result.report.total_value)
        x = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(result.model(x), case.model(x), rtol=0, atol=0)


def test_unreachable_budget_names_the_smallest_cost_and_what_is_frozen(case):
    smallest = case.groups.macs([1] * len(case.groups))
    with pytest.raises(BudgetError) as error:
        case.prune(tk.Budget(macs=1e-6))
    assert f"the smallest reachable is {human(smallest)} MACs of {human(case.macs())} MACs" in str(error.value)
    assert "fc (the model's output)" in str(error.value)
    with pytest.raises(BudgetError, match="parameters: the smallest reachable"):
        case.prune(tk.Budget(macs=0.9, params=1e-9))
    with pytest.raises(BudgetError, match="relax min_keep"):
        case.prune(tk.Budget(macs=0.3), ignore="*")


def test_smallest_reachable_budget_is_reached(case):
    smallest = case.groups.macs([1] * len(case.groups))
    result = case.prune(tk.Budget(macs=smallest))
    assert case.macs(result.model) == smallest
    with pytest.raises(BudgetError):
        case.prune(tk.Budget(macs=smallest - 1))


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [8, 16])
def test_round_to_keeps_multiples(case, multiple):
    result = case.prune(tk.Budget(macs=0.5), round_to=multiple)
    counts = {name: len(kept) for name, kept in result.keep.items()}
    assert all(count % multiple == 0 for count in counts.values()), counts
    assert case.macs(result.model) <= 0.5 * case.macs()
    costs = macs_cost(case.groups)
    for name, size in GROUPS.items():  # one more bundle of any group would not have fitted
        more = [n + multiple * (g == name) for g, n in counts.items()]
        assert counts[name] == size or costs.at(more) > 0.5 * case.macs()


def test_round_to_counts_channels_not_units():
    """A unit of the grouped conv is two channels: four channels are two units."""
    model = mixed()
    groups = mixed_groups(model)
    result = tk.prune(model, groups=groups, budget=tk.Budget(macs=0.6), round_to=4, criterion="magnitude")
    channels = {layer.name: layer.kept for layer in result.report.layers}
    sizes = {"stem": 6, "inner": 8, "outer": 6, "before": 8, "grouped": 8}
    assert {n: channels[n] for n in sizes if channels[n] % 4 and channels[n] != sizes[n]} == {}
    assert any(channels[name] < size for name, size in sizes.items())
    assert result.model.grouped.groups == 2


@pytest.mark.parametrize(("min_keep", "least"), [(20, lambda n: 20), (0.4, lambda n: n * 0.4), (1, lambda n: 1)])
def test_min_keep(case, min_keep, least):
    result = case.prune(tk.Budget(macs=0.35), min_keep=min_keep)
    assert all(len(result.keep[name]) >= least(size) for name, size in GROUPS.items())
    check_budget(case.macs(result.model), 0.35 * case.macs(), one_unit(case, result, macs_cost(case.groups)))


def test_min_keep_is_kept_to_where_it_matters(case):
    free = case.prune(tk.Budget(macs=0.1))
    held = case.prune(tk.Budget(macs=0.2), min_keep=12)
    assert min(len(kept) for kept in free.keep.values()) < 12 <= min(len(kept) for kept in held.keep.values())


@pytest.mark.parametrize(
    ("ignore", "untouched"),
    [
        ("convs1.*", {"convs1.0", "convs1.1", "convs1.2"}),
        (["stem", "squeeze"], {"stem", "squeeze"}),
        ("convs2.1", {"stem"}),  # a layer that makes the residual stream stands for its group
        (":streams", {"stem"}),
    ],
)
def test_ignored_groups_keep_all(case, ignore, untouched):
    result = case.prune(tk.Budget(macs=0.6), ignore=ignore)
    assert {name for name in untouched if len(result.keep[name]) != GROUPS[name]} == set()
    assert any(len(result.keep[name]) < size for name, size in GROUPS.items())
    check_budget(case.macs(result.model), 0.6 * case.macs(), one_unit(case, result, macs_cost(case.groups)))


def test_bounds_of_single_groups(case):
    result = case.prune(tk.Budget(macs=0.5), bounds={"convs1.0": (40, 48), "stem": (0.25, 0.5), "squeeze": (7, 7)})
    assert len(result.keep["convs1.0"]) >= 40
    assert 8 <= len(result.keep["stem"]) <= 16
    assert len(result.keep["squeeze"]) == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ignore": "layer9.*"}, "'layer9.*' matches no group"),
        ({"bounds": {"nothing": (1, 2)}}, "'nothing' matches no group"),
        ({"bounds": {"stem": (20, 10)}}, "20 is more than 10"),
        ({"round_to": 0}, "round_to"),
        ({"round_to": 2.5}, "round_to"),
        ({"min_keep": 0}, "min_keep"),
        ({"min_keep": "half"}, "min_keep"),
    ],
)
def test_options_that_make_no_sense(case, options, words):
    with pytest.raises(KnapsackError, match=words.replace("*", r"\*")):
        case.prune(tk.Budget(macs=0.5), **options)


def test_budget_and_scores_are_checked(case):
    with pytest.raises(BudgetError, match="must be a Budget"):
        case.prune(0.5)
    with pytest.raises(ScoreError, match="other groups"):
        tk.prune(case.model, scores={"a": torch.ones(3)}, groups=case.groups, budget=tk.Budget(macs=0.5))
    with pytest.raises(ScoreError, match="needs data"):
        tk.prune(case.model, groups=case.groups, budget=tk.Budget(macs=0.5))


# ---- what comes out ---------------------------------------------------------------------------------------------


def same_keep(a, b):
    return set(a.keep) == set(b.keep) and all(torch.equal(a.keep[name], b.keep[name]) for name in a.keep)


def test_slim_is_the_masked_model_and_the_original_is_untouched(case):
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    result = case.prune(tk.Budget(macs=0.4))
    x = torch.randn(2, 3, 32, 32)
    masked = mask_model(case.model, case.groups, result.keep)
    torch.testing.assert_close(result.model(x), masked(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):  # it is not what any other choice gives
        other = {**result.keep, "stem": (result.keep["stem"] + 1) % 32}
        torch.testing.assert_close(result.model(x), mask_model(case.model, case.groups, other)(x), rtol=1e-4, atol=1e-5)
    after = case.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not hasattr(case.model, "channel_config")
    assert {t.data_ptr() for t in result.model.parameters()}.isdisjoint(t.data_ptr() for t in case.model.parameters())


def test_the_best_units_of_each_group_stay(case):
    result = case.prune(tk.Budget(macs=0.5))
    for name, kept in result.keep.items():
        gone = torch.ones(GROUPS[name], dtype=torch.bool)
        gone[kept] = False
        values = case.scores[name]
        assert torch.equal(kept, kept.sort().values)
        assert not gone.any() or values[kept].min() >= values[gone].max()


def test_prune_from_a_loader_is_scoring_and_pruning():
    model = mixed()
    groups, batches = mixed_groups(model), batches_of(8)
    budget = tk.Budget(macs=0.5)
    scores = tk.taylor_scores(model, groups, batches, "sum")
    direct = tk.prune(model, batches, budget=budget, example_inputs=torch.empty(1, 3, 8, 8), criterion="sum")
    assert same_keep(direct, tk.prune(model, scores=scores, groups=groups, budget=budget))
    assert direct.report.scores == {"criterion": "sum", "data": "", "samples": 8}


def test_plain_dict_scores_do(case):
    plain = {name: values.float().numpy() for name, values in case.scores.items()}
    result = tk.prune(case.model, scores=plain, groups=case.groups, budget=tk.Budget(macs=0.5))
    assert same_keep(result, case.prune(tk.Budget(macs=0.5)))


def test_sweep_is_single_prunes(case):
    budgets = [tk.Budget(macs=0.7), tk.Budget(macs=0.4), tk.Budget(params=0.5)]
    family = tk.sweep(case.model, case.scores, budgets, groups=case.groups, round_to=2)
    for result, budget in zip(family, budgets, strict=True):
        single = case.prune(budget, round_to=2)
        assert same_keep(result, single)
        assert result.channel_config == single.channel_config
        assert result.report.costs == single.report.costs
    assert not same_keep(family[0], family[1])
    values = [result.report.value for result in tk.sweep(case.model, case.scores, budgets[:2], groups=case.groups)]
    assert values[0] > values[1]


def test_report(case):
    result = case.prune(tk.Budget(macs=0.5, params=0.9), ignore="squeeze", min_keep=2)
    report = result.report
    assert report.model == "Net" and report.input_size == SHAPE[1:]
    assert report.value == pytest.approx(sum(float(case.scores[g][kept].sum()) for g, kept in result.keep.items()))
    assert report.total_value == pytest.approx(sum(float(values.sum()) for values in case.scores.values()))
    assert report.value <= report.upper_bound
    assert report.rounds >= 1 and report.seconds > 0
    assert report.frozen == {"fc": "the model's output"}
    assert report.scores["criterion"] == "made up"
    options = {"round_to": 1, "min_keep": 2, "ignore": ["squeeze"], "bounds": {}}
    assert report.options == {**options, "budget": {"macs": 0.5, "params": 0.9}}
    kept = {layer.name: (layer.original, layer.kept) for layer in report.layers}
    for name, module in result.model.named_modules():
        if isinstance(module, nn.Conv2d):
            assert kept[name] == (case.model.get_submodule(name).out_channels, module.out_channels)
    assert report.line("params").counted == case.params(result.model)
    assert json.loads(json.dumps(report.to_dict()))["costs"][0]["counted"] == case.macs(result.model)
    assert "importance kept" in str(report) and "MACs" in str(report)


def test_kept_channels_are_the_filters_that_stayed(case):
    result = case.prune(tk.Budget(macs=0.5))
    assert {"stem", "convs1.0", "convs2.2"} <= set(result.kept_channels)
    for layer, kept in result.kept_channels.items():
        full, slim = case.model.get_submodule(layer), result.model.get_submodule(layer)
        assert len(kept) == slim.weight.shape[0] < full.weight.shape[0]
    stem = case.model.stem.weight[result.kept_channels["stem"]]
    assert torch.equal(stem, result.model.stem.weight)


# ---- again and again --------------------------------------------------------------------------------------------


def test_pruning_a_pruned_model_composes_to_the_original_base(resnet):
    groups = resnet.groups
    config = resnet.prune(tk.Budget(macs=0.7)).channel_config
    assert config.base == "resnet10t"
    first = resnet.prune(tk.Budget(macs=0.7), bounds={"layer4.0.conv1": (512, 512)}).model
    again = tk.find_channel_groups(first, torch.empty(resnet.shape))
    assert {group.name for group in again} == {group.name for group in groups}
    scores = tk.taylor_scores(first, again, criterion="random")
    result = tk.prune(first, scores=scores, groups=again, budget=tk.Budget(macs=0.5), base_args={"num_classes": 10})
    second, config = result.model, result.channel_config
    assert config.base == "resnet10t"
    check_budget(resnet.macs(second), 0.5 * resnet.macs(first), 0)
    with torch.device("meta"):
        base = timm.create_model("resnet10t", num_classes=10)
    rebuilt = tk.resize_model(base, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in second.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in rebuilt.state_dict().items()} == shapes
    rebuilt = rebuilt.to_empty(device="cpu").eval()
    rebuilt.load_state_dict(second.state_dict())
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(rebuilt(x), second.eval()(x), rtol=0, atol=0)
    # Widths that the second step left alone are those of the first, not of the base.
    assert first.layer4[0].conv1.out_channels == 512
    assert any(config.widths[name][0] < shape[0] for name, shape in groups.shapes.items() if name in config.widths)


def test_one_more_step_only_removes(case):
    results = [case.prune(tk.Budget(macs=0.8))]
    for fraction in (0.8, 0.8):
        model = results[-1].model
        groups = tk.find_channel_groups(model, torch.empty(SHAPE))
        scores = tk.taylor_scores(model, groups, criterion="magnitude")
        results.append(tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=fraction)))
    macs = [case.macs(), *(case.macs(result.model) for result in results)]
    assert all(0.99 <= after / before / 0.8 <= 1 for before, after in itertools.pairwise(macs))
    for before, after in itertools.pairwise(results):
        widths = before.channel_config.widths
        for name, dims in widths.items():
            assert all(after.channel_config.widths[name][dim] <= size for dim, size in dims.items())


def test_model_without_groups():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))
    with pytest.raises(BudgetError, match="no channels that can be removed"):
        tk.prune(model, scores={}, budget=tk.Budget(macs=0.5), example_inputs=torch.empty(1, 3, 2, 2))


def test_training_mode_and_class_are_kept():
    model = mixed().train()
    model.bn1.eval()
    result = tk.prune(model, groups=mixed_groups(model), budget=tk.Budget(macs=0.5), criterion="magnitude")
    assert type(result.model) is Mixed
    assert result.model.training and not result.model.bn1.training


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"minkeep": 0.3}, "prune has no argument 'minkeep'; did you mean 'min_keep'"),
        ({"criterio": "sum"}, "did you mean 'criterion'"),
        ({"zzz": 1}, "prune has no argument 'zzz'; there are model, loader, scores, budget"),
        ({"criterion": "sum"}, "criterion='sum' is for scoring, and scores are given"),
    ],
)
def test_a_keyword_that_prune_does_not_have_is_refused(keywords, words):
    model = mixed()
    groups = mixed_groups(model)
    scores = {group.name: torch.ones(group.size) for group in groups}
    with pytest.raises(KnapsackError, match=words):
        tk.prune(model, scores=scores, budget=tk.Budget(macs=0.5), groups=groups, **keywords)


def test_keywords_of_scoring_are_passed_on():
    model = mixed()
    result = tk.prune(model, budget=tk.Budget(macs=0.5), groups=mixed_groups(model), criterion="random", seed=3)
    assert result.report.scores["criterion"] == "random"


def test_negative_scores_are_refused_and_not_pruned_far_below_the_budget():
    """A unit of negative value is better gone than kept, so the search would go on below the budget."""
    case = Case(Net(), SHAPE)
    scores = {name: values - values.median() for name, values in case.scores.items()}
    with pytest.raises(ScoreError, match=r"scores\['.*'\] has a negative value, -.*subtract the least"):
        tk.prune(case.model, scores=scores, groups=case.groups, budget=tk.Budget(macs=0.9))
    least = min(values.min() for values in scores.values())
    shifted = {name: values - least for name, values in scores.items()}
    result = tk.prune(case.model, scores=shifted, groups=case.groups, budget=tk.Budget(macs=0.9))
    macs = result.report.line("macs")
    assert 0.99 * macs.asked < macs.counted <= macs.asked
