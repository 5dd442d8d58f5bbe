"""Whatever shape a batch has, every part of the pipeline reads the same images and labels out of it."""

from collections import UserDict

import pytest
import timm
import torch

import timm_knapsack as tk
from timm_knapsack.errors import DataError, ScoreError
from timm_knapsack.images.model_labels import ModelLabels
from timm_knapsack.maps.batches import labelled, targets_of

SHAPES = {
    "dict of transformers": lambda x, y: {"pixel_values": x, "labels": y},
    "dict of datasets": lambda x, y: {"img": x, "label": y},
    "BatchFeature": lambda x, y: UserDict(pixel_values=x, labels=y),  # transformers' own is a UserDict
    "list": lambda x, y: [x, y],
    "with more": lambda x, y: (x, y, "a name"),
}


@pytest.fixture(scope="module")
def setting():
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20", channels=(4, 8, 8)).eval()
    pairs = [(torch.randn(4, 3, 16, 16), torch.randint(10, (4,))) for _ in range(2)]
    return model, tk.find_channel_groups(model), pairs


def everything(model, groups, loader) -> dict[str, torch.Tensor]:
    """All that the pipeline makes of a loader, as tensors."""
    made = {"evaluated": torch.tensor(list(tk.evaluate(model, loader).values()), dtype=torch.float64)}
    scores = tk.taylor_scores(model, groups, loader)
    made |= {f"scores {name}": value for name, value in scores.items()}
    made |= {f"curves {n}": torch.tensor(c.losses()) for n, c in tk.value_curves(model, groups, loader).items()}
    result = tk.prune(model, loader, scores=scores, groups=groups, budget=tk.Budget(macs=0.5))
    made |= {f"recovered {name}": value.clone() for name, value in result.model.state_dict().items()}
    made["lost"] = torch.tensor([result.report.loss.top1_before, result.report.loss.top1_after])
    config = tk.FinetuneConfig(epochs=1, lr=0.01, progress=False)  # the ridge start of inner KD reads batches, too
    tuned = tk.finetune(result.model, model, loader, loader, config).model
    return made | {f"tuned {name}": value for name, value in tuned.state_dict().items()}


@pytest.fixture(scope="module")
def expected(setting):
    return everything(*setting)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_stage_reads_the_same_out_of_a_batch(shape, setting, expected):
    model, groups, pairs = setting
    found = everything(model, groups, [SHAPES[shape](*pair) for pair in pairs])
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def test_other_labels_would_be_noticed(setting, expected):
    model, groups, pairs = setting
    found = everything(model, groups, [{"pixel_values": x, "labels": (y + 1) % 10} for x, y in pairs])
    assert not torch.equal(found["scores conv1"], expected["scores conv1"])
    assert torch.equal(found["curves conv1"], expected["curves conv1"]), "curves need no labels"


def test_samples_are_scored_one_by_one_from_dicts(setting):
    model, groups, pairs = setting
    plain = tk.taylor_scores(model, groups, pairs, per_sample=True)
    dicts = tk.taylor_scores(model, groups, [{"pixel_values": x, "labels": y} for x, y in pairs], per_sample=True)
    assert all(torch.equal(plain[name], dicts[name]) for name in plain)


def test_a_dataloader_of_dicts(setting, expected):
    """As `datasets` with a torch format gives them."""
    model, _, pairs = setting
    rows = [{"pixel_values": image, "labels": label} for x, y in pairs for image, label in zip(x, y, strict=True)]
    metrics = tk.evaluate(model, torch.utils.data.DataLoader(rows, batch_size=3))
    assert metrics["samples"] == 8 and metrics["top1"] == expected["evaluated"][0]


def test_images_alone_can_be_labelled_by_the_model(setting):
    model, _, pairs = setting
    [(images, labels)] = ModelLabels([{"pixel_values": pairs[0][0]}], model)
    assert torch.equal(images, pairs[0][0]) and torch.equal(labels, model(images).argmax(1))


def test_what_is_missing_is_said(setting):
    model, groups, pairs = setting
    images = pairs[0][0]
    assert targets_of(images) is None and targets_of({"pixel_values": images}) is None
    with pytest.raises(DataError, match="a dict with the keys pixel_values, answer, expected"):
        labelled({"pixel_values": images, "answer": pairs[0][1]})
    with pytest.raises(DataError, match="a tuple of ndarray, Tensor, expected"):
        labelled((images.numpy(), pairs[0][1]))
    with pytest.raises(ScoreError, match=r"a Tensor, expected .images, labels.*loss_fn="):
        tk.taylor_scores(model, groups, [images])
