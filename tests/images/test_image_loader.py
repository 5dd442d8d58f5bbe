"""tk.image_loader: the same pictures from every kind of source."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import timm_knapsack as tk
from timm_knapsack.errors import DataError

NETWORK = {"input_size": (3, 16, 16), "crop_pct": 1.0, "mean": (0.5,) * 3, "std": (0.5,) * 3, "num_classes": 5}
LABELS = [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.fixture(scope="module")
def pictures():
    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


def everything(loader) -> list[tuple[float, int]]:
    return sorted((float(x.double().sum()), int(y)) for batch in loader for x, y in zip(*batch, strict=True))


def test_every_source_gives_the_same_images(pictures, tmp_path):
    import datasets

    paths = []
    for split in ("train", "test"):
        for number, (picture, label) in enumerate(zip(pictures, LABELS, strict=True)):
            path = tmp_path / "folder" / split / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
            paths.append(path)
    table = datasets.Dataset.from_dict({"image": pictures, "label": LABELS})
    (tmp_path / "table").mkdir()
    table.to_parquet(tmp_path / "table" / "train.parquet")
    sources = {
        "list of PIL images": (pictures, LABELS),
        "list of paths": (paths[:8], LABELS),
        "array": (np.stack([np.asarray(p) for p in pictures]), LABELS),
        "folder": str(tmp_path / "folder"),
        "dataset": table,
        "dataset dict": datasets.DatasetDict(train=table),
        "parquet": tmp_path / "table" / "train.parquet",
        "torch dataset": list(zip(pictures, LABELS, strict=True)),
    }
    wanted = everything(tk.image_loader(sources["list of PIL images"], NETWORK, batch_size=3))
    assert [y for _, y in wanted].count(0) == 2
    for name, source in sources.items():
        split = "train" if name in ("folder", "dataset dict", "parquet") else None
        loader = tk.image_loader(source, NETWORK, split=split, batch_size=3)
        assert isinstance(loader, DataLoader) and everything(loader) == wanted, name


def test_a_part_stands_for_all_and_is_always_the_same(pictures):
    first, again = (list(tk.image_loader((pictures, LABELS), NETWORK, limit=5, batch_size=5)) for _ in range(2))
    assert torch.equal(first[0][0], again[0][0]) and len(first[0][1]) == 5
    order = torch.cat([y for _, y in tk.image_loader((pictures, LABELS), NETWORK, batch_size=2)]).tolist()
    assert sorted(order) == sorted(LABELS) and order != LABELS, "mixed, not class after class"


def test_images_without_labels(pictures):
    loader = tk.image_loader(pictures, NETWORK)
    assert not loader.has_labels and set(torch.cat([y for _, y in loader]).tolist()) == {-1}
    two = tk.image_loader((pictures[0], pictures[1]), NETWORK)  # a pair of images, not images and labels
    assert len(two.dataset) == 2 and not two.has_labels


@pytest.mark.parametrize(
    "source, options, words",
    [
        ("pictures", {"labels": "required"}, "this list has no labels"),
        (([], []), {}, "the list has no images"),
        (("pictures", [0, 1]), {}, "8 images, but labels of shape"),
        (("pictures", list("abcdefgh")), {}, "labels must be class numbers"),
        (("pictures", [9] * 8), {}, "label 9 of image 0 of the list is outside 0 … 4"),
        ("pictures", {"batchsize": 3}, "batch_size"),
        (["nothing.png"], {}, "nothing.png is no longer there"),
    ],
)
def test_mistakes(source, options, words, pictures):
    if source == "pictures":
        source = pictures
    elif source[0] == "pictures":
        source = (pictures, source[1])
    with pytest.raises(DataError, match=words):
        list(tk.image_loader(source, NETWORK, **options))
