"""Distillation: its defaults, the edges of what it takes, and its parts against their definitions."""

import copy
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from timm_knapsack.errors import TrainingError
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.training import distillation
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule, check_choice, check_number
from timm_knapsack.training.losses import ce_loss, kd_loss, project


def test_the_defaults_are_those_of_the_documentation():
    """A run that names none of them is the same run in each version."""
    assert asdict(DistillationConfig()) == {
        "kd_weight": 1.0, "ce_weight": None, "temperature": 1.0, "ikd_weight": 20.0, "ikd_at": "blocks",
        "ikd_reduction": "mean", "ikd_init": "ridge", "ikd_init_batches": 8, "ikd_ridge": 1e-4,
        "ikd_weight_decay": 1e-4, "label_smoothing": None,
    }  # fmt: skip
    logits, teacher = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(kd_loss(logits, teacher), kd_loss(logits, teacher, 1.0))
    assert torch.equal(ce_loss(logits, torch.tensor([1, 2, 3])), ce_loss(logits, torch.tensor([1, 2, 3]), 0.0))


EDGES = {
    "kd_weight": ((0, 0.5, 1e300), (-1e-9, math.inf, math.nan, True, "1", None)),
    "ce_weight": ((None, 0), (-1,)),
    "ikd_weight": ((0,), (-1,)),
    "ikd_ridge": ((0,), (-1,)),
    "ikd_weight_decay": ((0,), (-1,)),
    "temperature": ((1e-3, 0.5), (9e-4, 0)),
    "label_smoothing": ((None, 0, 1), (-0.1, 1.01)),
    "ikd_init_batches": ((1, 2), (0, 1.0)),
    "ikd_at": (("convs", "blocks", "stages", ["a"], ("a", "b")), ("a", [], ["a", 1], None, {"a"})),
    "ikd_reduction": (("mean", "sum"), ("max", None)),
    "ikd_init": (("ridge", "selection"), ("none",)),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_edges_of_what_a_config_may_say(name):
    right, wrong = EDGES[name]
    for value in right:
        DistillationConfig(**{name: value})
    for value in wrong:
        with pytest.raises(TrainingError, match=name):
            DistillationConfig(**{name: value})


def test_names_stand_once_and_the_bounds_are_said():
    assert DistillationConfig(ikd_at=["b", "a", "b"]).ikd_at == ("b", "a")
    with pytest.raises(TrainingError, match=r"^x must be a number at least 0, got -1$"):
        check_number("x", -1, 0)
    with pytest.raises(TrainingError, match=r"^x must be a whole number from 1 to 3, got 2.0$"):
        check_number("x", 2.0, 1, 3, whole=True)
    check_number("x", 3, 1, 3, whole=True)
    check_choice("x", "a", ["a", "b"])
    with pytest.raises(TrainingError, match="x must be one of 'a', 'b'; got 'c'"):
        check_choice("x", "c", ["a", "b"])


# ---- losses against their definitions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_kd_by_its_definition(temperature):
    logits, teacher = torch.randn(4, 3), torch.randn(4, 3) * 2
    p, q = (teacher / temperature).softmax(1), (logits / temperature).log_softmax(1)
    torch.testing.assert_close(kd_loss(logits, teacher, temperature), -(p * q).sum(1).mean() * temperature**2)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_ce_is_the_mean_of_the_labelled(smoothing):
    logits, labels = torch.randn(5, 3), torch.tensor([0, -1, 2, 1, -1])
    known = labels >= 0
    expected = F.cross_entropy(logits[known], labels[known], label_smoothing=smoothing)
    torch.testing.assert_close(ce_loss(logits, labels, smoothing), expected)
    shares = torch.rand(5, 3).softmax(1)
    expected = F.cross_entropy(logits, shares, label_smoothing=smoothing)
    torch.testing.assert_close(ce_loss(logits, shares, smoothing), expected)
    assert ce_loss(logits, torch.full((5,), -1), smoothing) == 0


# ---- the module


def network(width, classes=4, channels=3):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    return nn.Sequential(nn.Conv2d(channels, width, 1), nn.ReLU(), *head)


EXAMPLE = torch.randn(2, 3, 5, 5)


def module_of(student=None, teacher=None, example=EXAMPLE, kept=None, **options):
    config = DistillationConfig(**{"ikd_at": ["0"], "ikd_init": "selection", **options})
    kept = {"0": [1, 5]} if kept is None else kept
    return DistillationModule(student or network(2), teacher or network(8), config, kept, example)


@pytest.mark.parametrize("ce, kd, ikd", [(1, 1, 1), (0.5, 3, 7), (2, 0, 5), (2, 5, 0), (3, 0, 0)])
@pytest.mark.parametrize("smoothing", [None, 0.3])
def test_the_total_is_the_weighted_sum_and_what_is_off_is_not_computed(ce, kd, ikd, smoothing):
    module = module_of(ce_weight=ce, kd_weight=kd, ikd_weight=ikd, label_smoothing=smoothing)
    labels = torch.tensor([1, 3])
    losses = module(EXAMPLE, labels)
    torch.testing.assert_close(losses.total, ce * losses.ce + kd * losses.kd + ikd * losses.ikd)
    torch.testing.assert_close(losses.ce, ce_loss(losses.logits, labels, smoothing or 0.0))
    torch.testing.assert_close(losses.logits, module.student(EXAMPLE))
    assert bool(losses.kd) == bool(kd) and bool(losses.ikd) == bool(ikd)
    assert module.distils == bool(kd or ikd) and bool(module.taps) == bool(ikd)
    called = []
    module.teacher.register_forward_hook(lambda *_: called.append(1))
    module(EXAMPLE, labels)
    assert bool(called) == bool(kd or ikd)


@pytest.mark.parametrize("kd, ikd", [(0, 0), (1, 0), (0, 1)])
def test_without_a_teacher_nothing_may_want_one(kd, ikd):
    config = DistillationConfig(kd_weight=kd, ikd_weight=ikd)
    if kd or ikd:
        with pytest.raises(TrainingError, match="need a teacher"):
            DistillationModule(network(2), None, config)
        return
    module = DistillationModule(network(2), None, config)
    assert module.teacher is None and not module.distils and module.to(torch.float64) is module
    assert module(EXAMPLE.double(), torch.tensor([0, 1])).logits.dtype == torch.float64


def test_a_teacher_that_nobody_asks_is_left_as_it_is():
    teacher = network(8).train()
    DistillationModule(network(2), teacher, DistillationConfig(kd_weight=0, ikd_weight=0))
    assert teacher.training
    asked = module_of(teacher=teacher)
    assert not teacher.training
    teacher.train()
    asked.compare(EXAMPLE)
    assert not teacher.training


def test_the_teacher_moves_along():
    module = module_of()
    assert module.to(torch.float64) is module
    assert {p.dtype for p in (*module.teacher.parameters(), *module.student.parameters())} == {torch.float64}


def test_the_teacher_may_see_other_images():
    module = module_of(ikd_weight=0, temperature=2.0)
    other = torch.randn(2, 3, 5, 5)
    expected = kd_loss(module.student(EXAMPLE), module.teacher(other), 2.0)
    torch.testing.assert_close(module.compare(EXAMPLE, other)[1], expected)
    torch.testing.assert_close(module.compare(EXAMPLE)[1], module.compare(EXAMPLE, EXAMPLE)[1])


def two(width):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), *head)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_inner_distances_by_their_definition(reduction):
    student, teacher = two(4), two(4)
    module = module_of(student, teacher, ikd_at=["0", "2"], ikd_reduction=reduction)
    assert not list(module.projections)  # equal widths
    maps = [student[0](EXAMPLE), student[:3](EXAMPLE)], [teacher[0](EXAMPLE), teacher[:3](EXAMPLE)]
    squares = [(s - t).square() for s, t in zip(*maps, strict=True)]
    if reduction == "mean":
        expected = sum(square.mean() for square in squares) / 2
    else:
        expected = sum(square.sum() for square in squares) / len(EXAMPLE)
    torch.testing.assert_close(module.compare(EXAMPLE)[2], expected)


def test_the_start_tells_how_far_the_student_is_and_waits_for_data():
    module = module_of(ikd_init="ridge", kept={})
    assert module.awaits_data
    with pytest.raises(TrainingError, match="not initialised"):
        module.compare(EXAMPLE)
    nats = module.init_from_data([EXAMPLE, (EXAMPLE[:1], None)])
    images = torch.cat([EXAMPLE, EXAMPLE[:1]])
    with torch.no_grad():
        p, q = module.teacher(images).log_softmax(1), module.student(images).log_softmax(1)
    assert nats == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-4)
    assert not module.awaits_data and module.compare(EXAMPLE)[2] > 0
    fresh = module_of(ikd_init="ridge", kept={})
    fresh.load_state_dict(module.state_dict())
    assert not fresh.awaits_data  # the values came from there


def test_the_ridge_start_by_its_definition_also_where_nothing_is_seen():
    """Σ t sᵀ (Σ s sᵀ + λ · mean square · I)⁻¹, and zeros for a map of zeros."""
    module = module_of(ikd_init="ridge", kept={}, ikd_ridge=0.5)
    module.init_from_data([EXAMPLE])
    with torch.no_grad():
        s, t = (net[0](EXAMPLE).movedim(1, -1).flatten(0, 2).double() for net in (module.student, module.teacher))
    gram = s.T @ s
    expected = torch.linalg.solve(gram + 0.5 * gram.diagonal().mean() * torch.eye(2).double(), s.T @ t).T
    torch.testing.assert_close(module.projections["0"].double(), expected, rtol=1e-4, atol=1e-6)
    silent = network(2)
    nn.init.zeros_(silent[0].weight), nn.init.zeros_(silent[0].bias)
    module = module_of(silent, ikd_init="ridge", kept={})
    module.init_from_data([EXAMPLE])
    assert torch.equal(module.projections["0"], torch.zeros(8, 2))


def test_selected_matrices_keep_their_values():
    module = module_of()
    before = module.projections["0"].clone()
    module.init_from_data([EXAMPLE])
    assert torch.equal(module.projections["0"], before)
    assert before[[1, 5], [0, 1]].tolist() == [1, 1] and before.sum() == 2


def test_rows_are_summed_in_portions_to_the_same():
    student, teacher = torch.randn(70, 3), torch.randn(70, 5)
    for chunk in (7, 64, 100):
        grams = {}
        distillation._accumulate(grams, "a", student[:30], teacher[:30], chunk)
        distillation._accumulate(grams, "a", student[30:], teacher[30:], chunk)
        gram, cross = grams["a"]
        torch.testing.assert_close(gram, student.double().T @ student.double())
        torch.testing.assert_close(cross, teacher.double().T @ student.double())


@pytest.mark.parametrize("shape, dim", [((2, 3), 1), ((2, 5, 3), 2), ((2, 3, 4, 5), 1), ((2, 4, 5, 3), 3)])
def test_channels_in_any_layout(shape, dim):
    features, weight = torch.randn(shape), torch.randn(7, 3)
    projected = project(weight, features, dim)
    expected = (features.movedim(dim, -1) @ weight.T).movedim(-1, dim)
    torch.testing.assert_close(projected, expected)
    assert torch.equal(distillation._rows(features, dim), features.movedim(dim, -1).reshape(-1, 3))


TAP = SimpleNamespace(name="a.b", module="a.b")


@pytest.mark.parametrize(
    "student, teacher, dim",
    [
        ((2, 3), (2, 8), 1),
        ((2, 5, 3), (2, 5, 8), 2),
        ((2, 3, 4, 4), (2, 8, 4, 4), 1),
        ((2, 4, 4, 3), (2, 4, 4, 8), 3),
        ((2, 3, 4), (2, 3, 4), None),
        ((2, 3, 4), (2, 8, 4), "[1]"),
        ((2, 4, 3, 4), (2, 4, 8, 4), "[2]"),
        ((1, 3), (2, 3), "[0]"),
        ((3,), (8,), "[0]"),
        ((2, 3, 4, 4), (2, 8, 4, 5), "[1, 3]"),
    ],
)
def test_maps_may_differ_in_their_channels_alone(student, teacher, dim):
    maps = torch.zeros(student), torch.zeros(teacher)
    if not isinstance(dim, str):
        assert distillation._channel_dim(TAP, *maps) == dim
        return
    with pytest.raises(TrainingError) as caught:
        distillation._channel_dim(TAP, *maps)
    assert f"a.b: the maps must differ in their channels only, but dims {dim} differ" in str(caught.value)


@pytest.mark.parametrize("kept, right", [
    ([0, 7], True), ([7, 0], True), ([0, 8], False), ([-1, 3], False), ([3, 3], False), ([[0, 1], [2, 3]], False),
])  # fmt: skip
def test_kept_channels_are_different_ones_that_the_teacher_has(kept, right):
    teacher = network(8)
    if right:
        matrix = distillation._selection(teacher, "0", {"0": kept}, 8, 2)
        assert torch.equal(matrix.T, torch.eye(8)[kept])
    else:
        with pytest.raises(TrainingError, match=r"kept\['0'\] must hold 2 different channels from 0 to 7"):
            distillation._selection(teacher, "0", {"0": kept}, 8, 2)


def test_kept_of_another_number_of_channels_is_none():
    with pytest.raises(TrainingError, match=r"needs kept\['0'\]: which 2 of the teacher's 8 channels .*: none\)"):
        distillation._selection(network(8), "0", {"0": [1, 2, 3]}, 8, 2)


@pytest.mark.parametrize("says", ["teacher", "student", "nobody"])
def test_the_example_is_an_image_of_whoever_says_its_size(says):
    teacher, student = network(8, channels=1), network(2, channels=1)
    if says == "nobody":
        with pytest.raises(TrainingError, match="does not say its input size"):
            distillation._example(teacher, student)
        return
    {"teacher": teacher, "student": student}[says].pretrained_cfg = {"input_size": (1, 6, 7)}
    example = distillation._example(teacher, student)
    assert example.shape == (1, 1, 6, 7) and not example.any()
    if says == "teacher":
        student.pretrained_cfg = {"input_size": (1, 9, 9)}
        assert distillation._example(teacher, student).shape == (1, 1, 6, 7)
        assert module_of(student, teacher, example=None)(torch.zeros(2, 1, 6, 7), torch.tensor([0, 1])).kd >= 0


def test_blocks_that_are_gone_have_no_maps_unless_they_are_named():
    teacher = nn.Sequential()
    teacher.conv, teacher.layers = nn.Conv2d(3, 4, 1), nn.Sequential(two(4)[:2], two(4)[:2])
    teacher.layers[0][0], teacher.layers[1][0] = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    teacher.rest = nn.Sequential(*two(4)[4:])
    student = copy.deepcopy(teacher)
    student.layers[1] = nn.Identity()
    student.channel_config = ChannelConfig("net", {}, removed={"layers.1": "identity"})
    found = DistillationModule(student, teacher, DistillationConfig(ikd_at="convs"), {}, EXAMPLE)
    assert not [tap.module for tap in found.taps if tap.module.startswith("layers.1")] and found.taps
    with pytest.raises(TrainingError):
        DistillationModule(student, teacher, DistillationConfig(ikd_at=["layers.1.0"]), {}, EXAMPLE)


def test_where_sums_in_float64_can_be_kept():
    assert distillation._exact_device(torch.zeros(1)) == torch.device("cpu")
    assert distillation._exact_device(torch.zeros(1, device="meta")) == torch.device("meta")
    other = SimpleNamespace(device=SimpleNamespace(type="mps"))
    assert distillation._exact_device(other) == torch.device("cpu")


class Talks(nn.Module):
    """Logits of whichever shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.weight = shape, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.shape if isinstance(self.shape, str) else self.weight.expand(self.shape)


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4), "words"])
def test_only_logits_are_distilled(shape):
    with pytest.raises(TrainingError, match=r"Talks must return logits \[batch, classes\]"):
        DistillationModule(Talks(shape), Talks(shape), DistillationConfig(ikd_weight=0), {}, EXAMPLE)
    DistillationModule(Talks((2, 3)), Talks((2, 3)), DistillationConfig(ikd_weight=0), {}, EXAMPLE)
