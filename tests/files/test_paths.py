"""Names that the system can't have, and files that never end: one line each, from whatever takes them."""

import os
import threading

import pytest
import torch

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.files.atomic import replacing_file, replacing_folder
from timm_knapsack.files.paths import named_path
from timm_knapsack.files.plain_json import read_limited
from timm_knapsack.images.loaders import create_loader
from timm_knapsack.models.model_source import ModelSource, load_weights
from timm_knapsack.pipeline.recipe import Recipe
from timm_knapsack.reports.run_record import RunRecord
from timm_knapsack.training.checkpoints import read_checkpoint, write_checkpoint

import timm  # isort: skip

NO_NAMES = {"zero": "a\0b", "half": "a\ud800b", "long": "a" * 300, "deep": "a/" * 3000 + "b"}


@pytest.fixture(scope="module")
def net():
    return timm.create_model("knapsack_pruned", channels=tk.ChannelConfig("cifar_resnet20", {}))


@pytest.fixture(scope="module")
def saved(net, tmp_path_factory):
    return tk.save_pretrained(net, tmp_path_factory.mktemp("saved") / "net", verify=False)


USES = {
    "save_pretrained": lambda net, name: tk.save_pretrained(net, name),
    "push_to_hub": lambda net, name: tk.push_to_hub(name, "me/net", dry_run=True),
    "load_pretrained": lambda net, name: tk.load_pretrained(name),
    "a model": lambda net, name: ModelSource(name).load(),
    "a folder of a model": lambda net, name: ModelSource(f"local-dir:{name}").load(),
    "weights of a model": lambda net, name: ModelSource("resnet18", pretrained=False, weights=name).load(),
    "weights": load_weights,
    "channels": lambda net, name: tk.ChannelConfig.load(name),
    "scores": lambda net, name: tk.Scores.load(name),
    "value curves": lambda net, name: tk.ValueCurves.load(name),
    "a latency table": lambda net, name: tk.LatencyTable.load(name),
    "a recipe": lambda net, name: Recipe.load(name),
    "a record": lambda net, name: RunRecord.load(name),
    "a checkpoint": lambda net, name: read_checkpoint(name),
    "a new checkpoint": lambda net, name: write_checkpoint(name, {"model": {}}, {}),
    "images": lambda net, name: create_loader(name, net),
}


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("use", USES)
def test_a_name_that_no_file_can_have_is_one_line(net, use, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KnapsackError, match="can't be the name of a file or folder: ") as caught:
        USES[use](net, NO_NAMES[name])
    assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("replacing", [replacing_file, replacing_folder])
def test_writers_of_such_a_name_raise_the_systems_error(replacing, name, tmp_path):
    with pytest.raises(OSError), replacing(f"{tmp_path}/{NO_NAMES[name]}"):
        pytest.fail("nothing can be written there")
    assert os.listdir(tmp_path) == [] or name == "deep"


def test_what_is_not_there_is_a_name_all_the_same(tmp_path):
    assert named_path(tmp_path / "no" / "such") == tmp_path / "no" / "such"
    (tmp_path / "file").write_text("")
    assert named_path(tmp_path / "file" / "below") == tmp_path / "file" / "below"
    assert str(named_path("~/net", home=True)) == os.path.expanduser("~/net")
    assert str(named_path("~/net")) == "~/net" and str(named_path("~nobody-here/net", home=True)) == "~nobody-here/net"
    with pytest.raises(KnapsackError, match="3 can't be the name"):
        named_path(3)


# ---- pipes ------------------------------------------------------------------------------------------------------


def in_time(call, seconds: float = 20):
    """What it raises; a call that waits for a pipe is let go by a writer, and fails the test."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits"
    return outcome[0]


FILES = ("config.json", "channels.json", "model.safetensors", "README.md", "kept_channels.png")


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_in_a_folder_from_a_stranger_is_not_waited_for(saved, file, tmp_path):
    folder = tmp_path / "net"
    folder.mkdir()
    for path in saved.iterdir():
        if path.name != file:
            (folder / path.name).write_bytes(path.read_bytes())
    os.mkfifo(folder / file)
    for use in (lambda: ModelSource(str(folder)).load(), lambda: tk.load_pretrained(folder)):
        assert isinstance(in_time(use), KnapsackError)
    published = in_time(lambda: tk.push_to_hub(folder, "me/net", dry_run=True))
    if file == "kept_channels.png":  # it need not be there
        assert file not in str(published)
    else:
        assert isinstance(published, KnapsackError)


@pytest.mark.parametrize(
    "read",
    [
        tk.ChannelConfig.load,
        tk.Scores.load,
        tk.ValueCurves.load,
        tk.LatencyTable.load,
        Recipe.load,
        lambda path: load_weights(torch.nn.Linear(1, 1), path),
    ],
)
def test_a_pipe_that_nobody_writes_to_is_an_error(read, tmp_path):
    os.mkfifo(tmp_path / "file")
    error = in_time(lambda: read(tmp_path / "file"))
    assert isinstance(error, KnapsackError) and "\n" not in str(error)


def test_a_pipe_in_the_place_of_a_saved_model_is_not_waited_for(net, tmp_path):
    (tmp_path / "net").mkdir()
    os.mkfifo(tmp_path / "net" / "config.json")
    assert "choose a new or an empty folder" in str(in_time(lambda: tk.save_pretrained(net, tmp_path / "net")))


def test_a_pipe_that_somebody_writes_to_is_read(tmp_path):
    """As ``timm-knapsack run <(…)`` has it; the writer may be slow."""
    reader, writer = os.pipe()
    threading.Timer(0.2, lambda: (os.write(writer, b"late"), os.close(writer))).start()
    try:
        assert in_time(lambda: read_limited(f"/dev/fd/{reader}", 100)) == "late"
    finally:
        os.close(reader)
