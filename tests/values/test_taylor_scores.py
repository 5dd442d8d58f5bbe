"""Scores against their formulas in plain torch; one process = two; the user's model as it was; errors in words."""

import json
import os

import pytest
import timm
import torch
from forks import in_two_processes
from mixed_net import CLASSES, Mixed, batches_of, mixed, mixed_groups
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError, ScoreError
from timm_knapsack.values.scores import check_scores


def each(n):
    return [[u] for u in range(n)]


PAIRS = [[u, u + 4] for u in range(4)]  # the same channel of both conv groups
# Worked out by hand: what makes a group's channels, and which rows of it belong to each unit.
MAKERS = {
    "stem": (each(6), ["stem.weight", "outer.weight"]),
    "inner": (each(8), ["inner.weight"]),
    "before": (PAIRS, ["before.weight"]),
    "grouped": (PAIRS, ["grouped.weight"]),
}
NORMS = {
    "stem": (each(6), ["bn0", "bn2"]),
    "inner": (each(8), ["bn1"]),
    "before": (PAIRS, ["bn3"]),
    "grouped": (PAIRS, ["bn4"]),
}


def reference(model, batches, criterion, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])):
    """The formulas of the module's docstring, batch by batch, weighted by the number of images."""
    parameters = dict(model.named_parameters())
    table = NORMS if criterion == "taylor_bn" else MAKERS
    totals = {name: torch.zeros(len(rows), dtype=torch.float64) for name, (rows, _) in table.items()}
    samples = 0
    for batch in batches:
        samples += len(batch[0])
        model.zero_grad()
        loss(model, batch).backward()

        def product(name, parameters=parameters):
            return (parameters[name] * parameters[name].grad).detach().double()

        for name, (rows, makers) in table.items():
            for unit, rows_of_unit in enumerate(rows):
                for maker in makers:
                    if criterion == "taylor_bn":
                        whole = product(f"{maker}.weight")[rows_of_unit] + product(f"{maker}.bias")[rows_of_unit]
                    else:
                        whole = product(maker)[rows_of_unit]
                    value = whole.abs().sum() if criterion == "abs" else whole.sum().abs()
                    totals[name][unit] += value * len(batch[0])
    model.zero_grad()
    return {name: total / samples for name, total in totals.items()}


def assert_same(scores, expected, rtol=1e-5):
    assert set(scores) == set(expected)
    for name in expected:
        torch.testing.assert_close(scores[name], expected[name], rtol=rtol, atol=0, msg=lambda m, n=name: f"{n}: {m}")


# ---- the formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["abs", "sum", "taylor_bn"])
def test_scores_are_the_formulas(criterion):
    model, batches = mixed(), batches_of()
    assert [len(labels) for _, labels in batches] == [4, 4, 4, 2]  # an uneven last batch weighs less
    scores = tk.taylor_scores(model, mixed_groups(model), batches, criterion)
    assert_same(scores, reference(model, batches, criterion), rtol=2e-4 if criterion != "abs" else 1e-5)
    assert scores.samples == 14 and scores.criterion == criterion


def test_scores_of_a_double_model_agree_to_double_precision():
    model, batches = mixed().double(), batches_of(dtype=torch.float64)
    for criterion in ("abs", "sum", "taylor_bn"):
        expected = reference(model, batches, criterion)
        assert_same(tk.taylor_scores(model, mixed_groups(model), batches, criterion), expected, rtol=1e-9)


def test_the_comparison_can_fail():
    model, batches = mixed(), batches_of()
    expected = reference(model, batches, "abs")
    wrong = {name: values * (1 + 1e-4) for name, values in expected.items()}
    with pytest.raises(AssertionError):
        assert_same(wrong, expected)
    with pytest.raises(AssertionError):
        assert_same(tk.taylor_scores(model, mixed_groups(model), batches, "sum"), expected)


def test_magnitude_is_the_norm_of_the_filters_and_needs_no_data():
    model = mixed()
    scores = tk.taylor_scores(model, mixed_groups(model), criterion="magnitude")
    state = model.state_dict()
    for name, (rows, makers) in MAKERS.items():
        norms = [sum(state[maker][unit].double().norm() for maker in makers) for unit in rows]
        torch.testing.assert_close(scores[name], torch.stack(norms), rtol=1e-5, atol=0)


def test_random_depends_on_the_seed_alone():
    model = mixed()
    groups = mixed_groups(model)
    first, again, other = (tk.taylor_scores(model, groups, criterion="random", seed=s) for s in (3, 3, 4))
    assert_same(first, again, rtol=0)
    assert not torch.equal(first["stem"], other["stem"])


def test_attention_heads_are_scored_whole():
    """A head owns its rows of q, of k and of v: in qkv.weight, 3 blocks of heads × width."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=1, num_heads=3, num_classes=CLASSES
    ).eval()
    images, labels = torch.randn(5, 3, 32, 32), torch.tensor([0, 1, 2, 3, 0])
    scores = tk.taylor_scores(model, tk.find_channel_groups(model), [(images, labels)])
    F.cross_entropy(model(images), labels).backward()

    def rows(name):
        weight = model.get_parameter(name)
        return (weight * weight.grad).abs().sum(1).detach().double()

    heads = rows("blocks.0.attn.qkv.weight").view(3, 3, 8).sum((0, 2))
    torch.testing.assert_close(scores["blocks.0.attn.qkv"], heads, rtol=1e-5, atol=0)
    torch.testing.assert_close(scores["blocks.0.mlp.fc1"], rows("blocks.0.mlp.fc1.weight"), rtol=1e-5, atol=0)
    patches = model.patch_embed.proj.weight
    stream = (patches * patches.grad).abs().sum((1, 2, 3)).detach().double()
    stream = stream + rows("blocks.0.attn.proj.weight") + rows("blocks.0.mlp.fc2.weight")
    torch.testing.assert_close(scores["patch_embed.proj"], stream, rtol=1e-5, atol=0)


# ---- per sample -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["abs", "sum"])
def test_per_sample_is_a_loop_over_single_images(criterion):
    model, batches = mixed().double(), batches_of(count=6, dtype=torch.float64)
    groups = mixed_groups(model)
    exact = tk.taylor_scores(model, groups, batches, criterion, per_sample=True)
    singles = batches_of(count=6, size=1, dtype=torch.float64)
    assert_same(exact, reference(model, singles, criterion), rtol=1e-9)
    assert_same(exact, tk.taylor_scores(model, groups, singles, criterion), rtol=1e-9)
    over_batches = tk.taylor_scores(model, groups, batches, criterion)
    assert not torch.allclose(exact["inner"], over_batches["inner"], rtol=1e-3)
    assert exact.samples == 6


class LooksAtValues(Mixed):
    def forward(self, x):
        return super().forward(x) if float(x.mean()) < 1e9 else x  # can't be vectorised


def test_per_sample_without_vectorising_gives_the_same():
    model = mixed()
    looking = LooksAtValues()
    looking.load_state_dict(model.state_dict())
    groups, batches = mixed_groups(model), batches_of(count=5)
    expected = tk.taylor_scores(model, groups, batches, per_sample=True)
    assert_same(tk.taylor_scores(looking, groups, batches, per_sample=True), expected, rtol=1e-4)


def test_per_sample_takes_a_loss_function():
    model, batches = mixed(), batches_of(count=5)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    scores = tk.taylor_scores(model, mixed_groups(model), batches, per_sample=True, loss_fn=loss)
    assert_same(scores, reference(model, batches_of(count=5, size=1), "abs", loss), rtol=1e-4)


# ---- losses, targets, precision ---------------------------------------------------------------------------------


def test_soft_targets_that_are_one_hot_are_labels():
    model, batches = mixed(), batches_of()
    groups = mixed_groups(model)
    soft = [(images, F.one_hot(labels, CLASSES).float()) for images, labels in batches]
    assert_same(tk.taylor_scores(model, groups, soft), tk.taylor_scores(model, groups, batches))


def test_any_loss_of_model_and_batch():
    model = mixed()
    dicts = [{"pixels": images} for images, _ in batches_of()]

    def loss(model, batch):
        return model(batch["pixels"]).square().mean()

    scores = tk.taylor_scores(model, mixed_groups(model), dicts, loss_fn=loss)
    pairs = [(batch["pixels"], None) for batch in dicts]
    assert_same(scores, reference(model, pairs, "abs", lambda model, batch: model(batch[0]).square().mean()))
    assert scores.samples == 14


def test_sums_are_kept_in_float64():
    """After a batch 1e9 times as large, float32 sums would not notice the others."""
    model, batches = mixed(), batches_of(count=16)
    groups = mixed_groups(model)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * batch[2]

    scaled = [(*batch, torch.tensor(1e9 if i == 0 else 1.0)) for i, batch in enumerate(batches)]
    everything, first, rest = (
        tk.taylor_scores(model, groups, part, loss_fn=loss) for part in (scaled, scaled[:1], scaled[1:])
    )
    for name, values in everything.items():
        assert values.dtype == torch.float64
        torch.testing.assert_close(values * 16 - first[name] * 4, rest[name] * 12, rtol=1e-4, atol=0)


# ---- the user's model stays as it was ---------------------------------------------------------------------------


def snapshot(model):
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grad": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
    }


def assert_unchanged(model, before):
    after = snapshot(model)
    for kind in ("requires_grad", "training"):
        assert after[kind] == before[kind], kind
    for kind in ("state", "grad"):
        for name, tensor in before[kind].items():
            same = after[kind][name] is None if tensor is None else torch.equal(after[kind][name], tensor)
            assert same, f"{kind} of {name} changed"


def in_use(model):
    """A model in the middle of something: partly frozen, partly training, with gradients."""
    model.train()
    model.bn1.eval()
    model.inner.weight.requires_grad_(False)
    model.stem.weight.grad = torch.full_like(model.stem.weight, 0.5)
    return model


@pytest.mark.parametrize("options", [{}, {"criterion": "taylor_bn"}, {"per_sample": True}, {"criterion": "magnitude"}])
def test_model_is_left_as_it_was(options):
    model = mixed()
    groups, batches = mixed_groups(model), batches_of(count=6)
    expected = tk.taylor_scores(model, groups, batches, **options)
    before = snapshot(in_use(model))
    scores = tk.taylor_scores(model, groups, batches, **options)
    assert_unchanged(model, before)
    assert_same(scores, expected, rtol=0)  # scoring is in eval mode whatever the model's is


def test_model_is_left_as_it_was_after_an_error():
    model = in_use(mixed())
    before = snapshot(model)
    with pytest.raises(ScoreError):
        tk.taylor_scores(model, mixed_groups(model), [*batches_of(4), (torch.zeros(1, 3, 8, 8), torch.tensor([99]))])
    assert_unchanged(model, before)


def test_the_check_that_nothing_changed_can_fail():
    model = in_use(mixed())
    before = snapshot(model)
    model(torch.randn(2, 3, 8, 8))  # a norm in training mode moves its statistics
    with pytest.raises(AssertionError, match=r"bn0\.running_mean"):
        assert_unchanged(model, before)


def test_scoring_works_under_no_grad():
    model, batches = mixed(), batches_of(count=4)
    groups = mixed_groups(model)
    with torch.no_grad():
        scores = tk.taylor_scores(model, groups, batches)
    assert_same(scores, tk.taylor_scores(model, groups, batches), rtol=0)


# ---- files ------------------------------------------------------------------------------------------------------


def test_saved_scores_are_loaded_with_where_they_come_from(tmp_path):
    model = timm.create_model("resnet10t", num_classes=CLASSES)
    groups = tk.find_channel_groups(model)
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    scores = tk.taylor_scores(model, groups, [(images, labels)], criterion="sum", data="2 random images")
    path = tmp_path / "scores.safetensors"
    scores.save(path)
    loaded = tk.Scores.load(path, groups)
    assert_same(loaded, scores, rtol=0)
    about = (loaded.criterion, loaded.model, loaded.data, loaded.samples)
    assert about == ("sum", "resnet10t", "2 random images", 2)
    assert all(values.dtype == torch.float64 for values in loaded.values())
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["about"])["model"] == "resnet10t"
    assert os.listdir(tmp_path) == ["scores.safetensors"]


def test_scores_of_other_groups_are_refused(tmp_path):
    model = mixed()
    groups = mixed_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="magnitude")
    path = tmp_path / "scores.safetensors"
    scores.save(path)
    other = timm.create_model("resnet10t")
    with pytest.raises(ScoreError, match=r"scores\.safetensors \(scored on Mixed\).*other groups.*taylor_scores"):
        tk.Scores.load(path, tk.find_channel_groups(other))
    with pytest.raises(ScoreError, match="which is no group"):
        check_scores({**scores, "layer9": torch.ones(3)}, groups)
    with pytest.raises(ScoreError, match=r"scores\['inner'\] has shape \[7\], the group has 8 units"):
        check_scores({**scores, "inner": torch.ones(7)}, groups)
    with pytest.raises(ScoreError, match="not finite"):
        check_scores({**scores, "inner": torch.full((8,), float("nan"))}, groups)


def test_files_that_are_no_scores_are_refused(tmp_path):
    weights, broken = tmp_path / "weights.safetensors", tmp_path / "broken.safetensors"
    save_file({"a": torch.ones(2)}, weights)
    broken.write_bytes(b"not safetensors")
    with pytest.raises(ScoreError, match="not a file of scores"):
        tk.Scores.load(weights)
    for path in (broken, tmp_path / "missing.safetensors"):
        with pytest.raises(ScoreError, match=r"can't be read as scores|there is no file"):
            tk.Scores.load(path)


# ---- several processes ------------------------------------------------------------------------------------------


def score_on_this_process(folder):
    """What each of two processes does; each saves what it got."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, accelerator.num_processes
    model, [(images, labels)] = mixed(), batches_of(30, 30)
    groups = mixed_groups(model)
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    results = {
        "loader": tk.taylor_scores(model, groups, loader, accelerator=accelerator),
        "list": tk.taylor_scores(model, groups, list(loader), accelerator=accelerator),
        "sum": tk.taylor_scores(model, groups, loader, "sum", accelerator),
        "per_sample": tk.taylor_scores(model, groups, loader, accelerator=accelerator, per_sample=True),
    }
    with pytest.raises(ScoreError, match=r"before accelerator\.prepare"):
        tk.taylor_scores(model, groups, accelerator.prepare(loader), accelerator=accelerator)
    for name, scores in results.items():
        assert scores.samples == 30, scores.samples
        scores.save(f"{folder}/{name}.{accelerator.process_index}")


def test_two_processes_give_the_scores_of_one(tmp_path):
    in_two_processes(score_on_this_process, tmp_path)
    model, batches = mixed(), batches_of(30, 8)
    groups = mixed_groups(model)
    one = {
        "loader": tk.taylor_scores(model, groups, batches),
        "list": tk.taylor_scores(model, groups, batches),
        "sum": tk.taylor_scores(model, groups, batches, "sum"),
        "per_sample": tk.taylor_scores(model, groups, batches, per_sample=True),
    }
    for name, expected in one.items():
        for rank in range(2):
            assert_same(tk.Scores.load(tmp_path / f"{name}.{rank}", groups), expected, rtol=1e-6)
    padded = tk.taylor_scores(model, groups, [*batches[:3], tuple(torch.cat([t, t[:2]]) for t in batches[3])])
    with pytest.raises(AssertionError):  # what Accelerate's padding to 32 samples would have given is told apart
        assert_same(padded, one["loader"], rtol=1e-6)


def test_progress_is_shown_on_request(capsys):
    model = mixed()
    tk.taylor_scores(model, mixed_groups(model), batches_of(4), progress=False)
    assert capsys.readouterr().err == ""
    tk.taylor_scores(model, mixed_groups(model), batches_of(4), progress=True)
    assert "scoring channels" in capsys.readouterr().err


# ---- kind errors ------------------------------------------------------------------------------------------------


def image(n=2):
    return torch.zeros(n, 3, 8, 8)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (None, "needs data: pass a loader"),
        ([], "no batch"),
        ([(image(), torch.tensor([0, CLASSES]))], "labels do not fit the model's classes"),
        ([(image(), torch.tensor([-1, -1]))], "no labels"),
        ([image()], r"expected \(images, labels\)"),
        ([{"pixels": image()}], r"expected \(images, labels\)"),
        ([(image() + float("nan"), torch.tensor([0, 1]))], "not finite"),
    ],
    ids=["no loader", "empty", "label out of range", "unlabelled", "images only", "dicts", "nan"],
)
def test_errors_say_what_to_do(loader, words, per_sample):
    model = mixed()
    with pytest.raises(ScoreError, match=words):
        tk.taylor_scores(model, mixed_groups(model), loader, per_sample=per_sample)


def test_unknown_criterion_names_the_known_ones():
    model = mixed()
    with pytest.raises(KnapsackError, match="'fisher' is not known; choose one of abs, sum"):
        tk.taylor_scores(model, mixed_groups(model), criterion="fisher")


def test_a_loss_that_is_not_finite_is_said():
    model = mixed()
    with pytest.raises(ScoreError, match="is the loss finite"):
        tk.taylor_scores(
            model, mixed_groups(model), batches_of(4), loss_fn=lambda model, batch: model(batch[0]).sum() * float("nan")
        )
