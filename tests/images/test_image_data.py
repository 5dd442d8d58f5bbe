"""One shape out of every source, the model's own preprocessing, and one helpful line for every mistake."""

import io
import os

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from PIL import Image

import timm_knapsack  # noqa: F401  (before timm)

import timm  # isort: skip
from timm.data import create_transform

from timm_knapsack.errors import DataError
from timm_knapsack.images import tables as image_tables
from timm_knapsack.images.augmentation import Augmentation, Preprocessing, Transform
from timm_knapsack.images.loaders import DataConfig, create_loader
from timm_knapsack.images.sampling import resume_at, sample_keys

CONFIG = {"input_size": (3, 16, 16), "crop_pct": 1.0, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
CLASSES = ("cat", "dog", "eel")


def pixels(count=12, size=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def png(image):
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory):
    """No network, and no traces in the user's cache."""
    import datasets
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        # 5 s after each shuffled stream, where the version sleeps at all
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)  # Accelerate remembers its processes for good
    GradientState._reset_state()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four images of each of three classes, in splits train and val."""
    root = tmp_path_factory.mktemp("folder")
    for split, seed in (("train", 0), ("val", 1)):
        for index, image in enumerate(pixels(seed=seed)):
            path = root / split / CLASSES[index // 4] / f"{index:02}.png"  # every library's order is then the same
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(image))
    return root


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    root = tmp_path_factory.mktemp("flat")
    for index, image in enumerate(pixels()):
        (root / f"{index}.png").write_bytes(png(image))
    return root


def table(seed=0, image="img", label="label", labels=None, **extra):
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as ImageFeature

    rows = {image: [{"bytes": png(p), "path": None} for p in pixels(seed=seed)]}
    features = {image: ImageFeature()}
    if label:
        rows[label] = [i // 4 for i in range(12)] if labels is None else labels
        kind = Value("string") if isinstance(rows[label][0], str) else ClassLabel(names=list(CLASSES))
        features[label] = kind if labels is None or isinstance(labels[0], str) else Value("int64")
    for name, values in extra.items():
        rows[name] = values
        features[name] = Value("int64")
    return Dataset.from_dict(rows, features=Features(features))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """The Hub's layout: one parquet file for each split; its name has capitals, which timm's reader would lower."""
    root = tmp_path_factory.mktemp("Parquet")
    table(0).to_parquet(root / "train-00000-of-00001.parquet")
    table(1).to_parquet(root / "test-00000-of-00001.parquet")
    return root


def all_of(loader):
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def expected(seed=0, config=CONFIG):
    """What timm itself makes of the images, one by one."""
    keys = ("input_size", "crop_pct", "mean", "std")
    transform = create_transform(**{key: config[key] for key in keys})
    return torch.stack([transform(Image.fromarray(image)) for image in pixels(seed=seed)])


LABELS = torch.arange(12) // 4

SOURCES = {
    "folder with splits": lambda folder, parquet: (folder, {"split": "train"}),
    "folder of classes": lambda folder, parquet: (str(folder / "train"), {}),
    "parquet folder": lambda folder, parquet: (parquet, {"split": "train"}),
    "parquet file": lambda folder, parquet: (parquet / "train-00000-of-00001.parquet", {}),
    "stream": lambda folder, parquet: (parquet, {"split": "train", "streaming": True}),
    "stream of a file": lambda folder, parquet: (parquet / "train-00000-of-00001.parquet", {"streaming": True}),
    "timm name": lambda folder, parquet: ("timm:torch/image_folder", {"root": folder, "split": "train"}),
    "timm folder": lambda folder, parquet: ("timm:", {"root": folder, "split": "train"}),
    "timm hfds": lambda folder, parquet: (f"hfds/{parquet}", {"split": "train"}),
    "timm hfids": lambda folder, parquet: (f"timm:hfids/{parquet}", {"split": "train"}),
    "dataset": lambda folder, parquet: (table(), {}),
    "dataset, other names": lambda folder, parquet: (table(image="photo", label="species"), {}),
    "dataset, class names": lambda folder, parquet: (table(labels=[CLASSES[i // 4] for i in range(12)]), {}),
    "array": lambda folder, parquet: ((pixels(), LABELS.numpy()), {}),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("in_memory", [None, False])
def test_every_source_gives_the_same_batches(source, in_memory, folder, parquet):
    source, options = source(folder, parquet)
    loader = create_loader(source, CONFIG, batch_size=5, in_memory=in_memory, num_classes=3, **options)
    images, labels = all_of(loader)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64 and loader.has_labels
    assert torch.equal(images, expected()) and torch.equal(labels, LABELS)


def test_dataset_dict_and_torch_dataset(folder):
    from datasets import DatasetDict
    from torchvision.datasets import ImageFolder

    both = DatasetDict(train=table(0), test=table(1))
    assert torch.equal(all_of(create_loader(both, CONFIG))[0], expected(1))
    assert torch.equal(all_of(create_loader(both, CONFIG, split="train"))[0], expected(0))
    loader = create_loader(ImageFolder(folder / "val"), CONFIG)
    assert torch.equal(all_of(loader)[1], LABELS) and loader.class_names == CLASSES


def test_saved_to_disk(tmp_path):
    table(0).save_to_disk(tmp_path / "one")
    images, labels = all_of(create_loader(tmp_path / "one", CONFIG))
    assert torch.equal(images, expected()) and torch.equal(labels, LABELS)


def test_splits_by_their_usual_names_and_by_purpose(folder, parquet):
    for split in ("val", "validation"):
        assert torch.equal(all_of(create_loader(folder, CONFIG, split=split))[0], expected(1))
    assert torch.equal(all_of(create_loader(folder, CONFIG))[0], expected(1))
    assert torch.equal(all_of(create_loader(parquet, CONFIG))[0], expected(1))
    train = create_loader(parquet, CONFIG, training=True, shuffle=False, augmentation={"crop": "none"}, batch_size=12)
    assert torch.equal(all_of(train)[0], expected(0))
    sliced = create_loader(parquet, CONFIG, split="train[:5]+test[:2]")
    assert torch.equal(all_of(sliced)[0], torch.cat([expected(0)[:5], expected(1)[:2]]))


def test_train_can_be_a_class(tmp_path):
    for name in ("bus", "train", "10", "9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(png(pixels(1)[0]))
    assert create_loader(tmp_path, CONFIG).class_names == ("9", "10", "bus", "train")


def test_a_flat_folder_has_no_labels(flat):
    loader = create_loader(flat, CONFIG, num_classes=10)
    images, labels = all_of(loader)
    assert not loader.has_labels and not loader.dataset.has_labels and set(labels.tolist()) == {-1}
    assert torch.equal(images, expected())  # 0.png … 11.png in natural order
    with pytest.raises(DataError, match="has no labels"):
        create_loader(flat, CONFIG, labels="required")


def test_labels_can_be_ignored(parquet):
    loader = create_loader(parquet, CONFIG, split="train", num_classes=1000, labels="ignore")
    assert not loader.has_labels and set(all_of(loader)[1].tolist()) == {-1}
    hidden = create_loader(table(labels=[-1] * 12), CONFIG, num_classes=3)
    assert not hidden.has_labels


def test_model_says_size_statistics_and_classes(folder):
    model = timm.create_model("resnet18", num_classes=3, pretrained_cfg_overlay={"input_size": (3, 64, 64)})
    images, _ = all_of(create_loader(folder, model, batch_size=4))
    config = timm.data.resolve_model_data_config(model)
    transform = create_transform(**config)
    assert torch.equal(images, torch.stack([transform(Image.fromarray(image)) for image in pixels(seed=1)]))
    assert create_loader(folder, model, input_size=32).dataset[0][0].shape == (3, 32, 32)
    with pytest.raises(DataError, match="3 classes, but the model has 10 outputs"):
        create_loader(folder, timm.create_model("resnet18", num_classes=10))


def test_grey_model(folder):
    model = timm.create_model("resnet18", num_classes=3, in_chans=1)
    images, _ = next(iter(create_loader(folder, model, input_size=16, batch_size=2)))
    assert images.shape == (2, 1, 16, 16)
    digits = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
    images, _ = all_of(create_loader((digits, [0, 1, 2, 0]), model, input_size=8))
    assert images.shape == (4, 1, 8, 8)


def test_images_of_several_sizes(tmp_path):
    for index, size in enumerate((16, 20, 30)):
        Image.fromarray(pixels(1, size)[0]).save(tmp_path / f"{index}.png")
    loader = create_loader(tmp_path, CONFIG)
    assert loader.dataset.pixels is None and all_of(loader)[0].shape == (3, 3, 16, 16)


def test_limit_is_a_fixed_random_choice(folder, parquet):
    chosen = [create_loader(folder, CONFIG, limit=5, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (all_of(loader) for loader in chosen)
    assert len(first[1]) == 5 and torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert len(set(first[1].tolist())) > 1  # not just the first class
    assert len(create_loader(folder, CONFIG, limit=500).dataset) == 12
    stream = create_loader(parquet, CONFIG, split="train", streaming=True, limit=5)
    assert torch.equal(all_of(stream)[0], expected()[:5])


def test_pad_crop_and_flip():
    """Each augmented image is one of the crops of the padded image; all crops and both flips occur."""
    image = pixels(1)[0]
    transform = Transform(Preprocessing.read(CONFIG), Augmentation(pad=1, vflip=0.5))
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    views = {}
    for top in range(3):
        for left in range(3):
            cut = padded[top : top + 16, left : left + 16]
            for flips in ((), (0,), (1,), (0, 1)):
                view = np.flip(cut, flips) if flips else cut
                evaluation = create_transform(**CONFIG)(Image.fromarray(np.ascontiguousarray(view)))
                views[evaluation.numpy().tobytes()] = (top, left, flips)
    keys = sample_keys(0, 0, np.arange(400))
    batch = transform.pixels(np.repeat(image.transpose(2, 0, 1)[None], 400, 0), keys)
    seen = [views[x.numpy().tobytes()] for x in batch]
    assert len(set(seen)) == 36
    singles = transform.images([Image.fromarray(image)] * 400, keys)
    assert torch.equal(torch.stack(singles), batch)


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m1", "original", "3a", "augmix-m10"])
def test_timm_policies_run(policy):
    """At full strength timm's policies posterize to 0 bits, which Pillow 13 refuses."""
    augmentation = {"auto_augment": policy, "crop": "rrc", "re_prob": 0.3, "color_jitter": [0.4, 0.4, 0.4]}
    images = pixels(60)
    loader = create_loader((images, [0] * 60), CONFIG, training=True, augmentation=augmentation, batch_size=60)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert torch.isfinite(next(iter(loader))[0]).all()


def test_stream_order_does_not_depend_on_workers_and_resumes(tmp_path):
    for shard in range(3):  # workers would share the files among them, if they were let
        table(shard).to_parquet(tmp_path / f"train-{shard}.parquet")
    options = {"training": True, "streaming": True, "batch_size": 5, "shuffle_buffer": 10, "seed": 2}
    files = {workers: create_loader(tmp_path, CONFIG, num_workers=workers, **options) for workers in (0, 2)}
    orders = []
    for epoch in (0, 1):
        for loader in files.values():
            loader.set_epoch(epoch)
        whole, by_workers = (list(loader) for loader in files.values())
        assert len(whole) == 7  # 36 images, the last one dropped
        assert all(torch.equal(a, b) for x, y in zip(whole, by_workers, strict=True) for a, b in zip(x, y, strict=True))
        orders.append(torch.cat([x for x, _ in whole]))
        for loader in files.values():
            rest = list(resume_at(loader, epoch, 3))
            assert torch.equal(torch.cat([x for x, _ in rest]), orders[-1][15:])
        assert len(list(files[0])) == 7  # the loader itself still begins at the beginning
    assert not torch.equal(*orders)


def test_stream_through_accelerate(parquet):
    import accelerate

    loader = create_loader(parquet, CONFIG, split="train", streaming=True, training=True, batch_size=4)
    loader.set_epoch(1)
    whole = torch.cat([x for x, _ in loader])
    prepared = accelerate.Accelerator(cpu=True).prepare_data_loader(loader)
    prepared.set_epoch(1)
    assert torch.equal(torch.cat([x for x, _ in prepared]), whole)
    assert torch.equal(torch.cat([x for x, _ in resume_at(prepared, 1, 1)]), whole[4:])
    assert torch.equal(torch.cat([x for x, _ in resume_at(prepared, 1)]), whole)


def test_training_keeps_whole_batches_only():
    data = (pixels(10), [0] * 10)
    assert [len(y) for _, y in create_loader(data, CONFIG, training=True, batch_size=4)] == [4, 4]
    assert [len(y) for _, y in create_loader(data, CONFIG, batch_size=4)] == [4, 4, 2]
    assert [len(y) for _, y in create_loader(data, CONFIG, training=True, batch_size=64)] == [10]


def broken(tmp_path, content=b"\x89PNG\r\n\x1a\nnothing of an image"):
    (tmp_path / "a.png").write_bytes(png(pixels(1)[0]))
    (tmp_path / "b.png").write_bytes(content)
    return tmp_path


def mixed(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(png(pixels(1)[0]))
    (tmp_path / "b.png").write_bytes(png(pixels(1)[0]))
    return tmp_path


def text_file(tmp_path):
    (tmp_path / "labels.txt").write_text("cat")
    return tmp_path / "labels.txt"


# What a user does (given an empty folder, the folder with splits, the tables), and what the answer says.
MISTAKES = {
    "missing folder": (lambda empty, *_: ("/no/such/folder", {}), "no such folder or file: /no/such/folder"),
    "empty folder": (lambda empty, *_: (empty, {}), "no images in .*: looked for .jpg"),
    "a file": (lambda empty, *_: (text_file(empty), {}), "labels.txt is a file; give a folder"),
    "not an image": (lambda empty, *_: (broken(empty, b"hello"), {}), "b.png is not an image, or is damaged"),
    "damaged png": (lambda empty, *_: (broken(empty), {}), "b.png"),
    "truncated png": (lambda empty, *_: (broken(empty, png(pixels(1)[0])[:400]), {}), "can't read .*b.png"),
    "images beside classes": (lambda empty, *_: (mixed(empty), {}), "1 images beside its 1 class folders"),
    "split of a folder": (lambda *args: (args[1], {"split": "holdout"}), "no split 'holdout'; it has train, val"),
    "no splits": (lambda *args: (args[1] / "train", {"split": "test"}), "isn't divided into train"),
    "split of a table": (lambda *args: (args[2], {"split": "holdout"}), "no split 'holdout'; it has train, test"),
    "image column": (lambda *_: (table(), {"image_column": "photo"}), "no column 'photo' .* it has img, label"),
    "label column": (lambda *_: (table(), {"label_column": "species"}), "no column 'species' .* it has img, label"),
    "no image column": (lambda *_: (table().select_columns("label"), {}), "no image column; name one .* out of label"),
    "label needed": (lambda *_: (table(label=None), {"labels": "required"}), "has no labels, and this needs them"),
    "class count": (lambda *_: (table(), {"num_classes": 1000}), "3 classes, but the model has 1000 outputs"),
    "label too large": (
        lambda *_: (table(labels=list(range(12))), {"num_classes": 10}),
        "label 10 of row 10 of .* is outside 0 … 9: the model has 10 outputs",
    ),
    "negative label": (lambda *_: (table(labels=[0, -5] * 6), {}), "label -5 of row 1 .* is negative"),
    "unreachable hub": (lambda *_: ("nobody/nothing", {}), "can't reach 'nobody/nothing' on the Hugging Face Hub"),
    "timm dataset": (lambda p, *_: ("timm:torch/cifar10", {"root": p}), "timm can't open 'torch/cifar10'.*root="),
    "unknown timm dataset": (lambda p, *_: ("timm:torch/nothing", {"root": p}), "Unknown torchvision dataset"),
    "timm without order": (lambda *_: ("timm:wds/x", {}), "use datasets instead"),
    "float images": (lambda *_: (pixels().astype(float), {}), "images must be uint8 .* not float64"),
    "too few labels": (lambda *_: ((pixels(), [0, 1]), {}), "12 images, but labels of shape \\[2\\]"),
    "a number": (lambda *_: (5, {}), "can't read images from a int"),
    "unknown option": (lambda *_: (pixels(), {"batchsize": 3}), "option 'batchsize'; did you mean 'batch_size'"),
    "unknown augmentation": (lambda *_: (pixels(), {"augmentation": {"hflp": 1}}), "did you mean 'hflip'"),
    "batch size": (lambda *_: (pixels(), {"batch_size": 0}), "batch_size=0: give an integer of at least 1"),
    "policy": (
        lambda *_: (pixels(), {"training": True, "augmentation": {"auto_augment": "best"}}),
        "timm can't build this augmentation",
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_answered_in_one_line(mistake, message, tmp_path, folder, parquet):
    source, options = mistake(tmp_path, folder, parquet)
    with pytest.raises(DataError, match=message) as caught:
        create_loader(source, CONFIG, **options)
    assert "\n" not in str(caught.value)


def test_damaged_image_is_named_from_a_worker_too(tmp_path):
    loader = create_loader(broken(tmp_path, b"hello"), CONFIG, in_memory=False, num_workers=1)
    with pytest.raises(DataError, match=r"b.png is not an image, or is damaged") as caught:
        list(loader)
    assert "\n" not in str(caught.value)


def test_folder_without_permission(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    if os.geteuid() == 0:  # root may read anything: have the system say no

        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(os, "listdir", refuse)
    else:
        (tmp_path / "locked").chmod(0)
    with pytest.raises(DataError, match=r"no permission to read .*locked"):
        create_loader(tmp_path / "locked", CONFIG)


def test_file_without_permission(flat, monkeypatch):
    loader = create_loader(flat, CONFIG, in_memory=False)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DataError, match=r"no permission to read .*0.png"):
        list(loader)


def test_no_network_is_said_at_once(monkeypatch):
    """With the Hub's name not to be resolved, its client is told so, rather than left to retry for 24 s."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(image_tables, "_resolves", lambda endpoint: False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match="can't reach 'nobody/nothing'"):
        create_loader("nobody/nothing", CONFIG)
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_config_is_data():
    config = DataConfig(batch_size=2, augmentation={"crop": "rrc", "scale": [0.2, 1.0]})
    assert config == DataConfig(batch_size=2, augmentation=Augmentation(crop="rrc", scale=(0.2, 1.0)))
    assert len(create_loader((pixels(), [0] * 12), CONFIG, config)) == 6
    assert len(create_loader((pixels(), [0] * 12), CONFIG, config, batch_size=3)) == 4
