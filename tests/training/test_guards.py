"""What a run refuses: other data, impossible counters, wrong labels, a folder in use, loaders of different length."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import in_two_processes
from test_finetune import PLAIN, batches, network
from torch.utils.data import DataLoader, TensorDataset

from timm_knapsack.errors import CheckpointError, TrainingError
from timm_knapsack.files.plain_json import write_json
from timm_knapsack.training.checkpoints import read_checkpoint, write_checkpoint
from timm_knapsack.training.finetuning import FinetuneConfig, evaluate, finetune


@pytest.fixture
def config(tmp_path):
    return FinetuneConfig(epochs=2, lr=0.05, distillation=PLAIN, output_dir=str(tmp_path / "run"))


def loader(images=16, seed=0, change=None):
    pixels, labels = (torch.cat(part) for part in zip(*batches(images, seed=seed), strict=True))
    if change:
        change(pixels, labels)
    return DataLoader(TensorDataset(pixels, labels), batch_size=4)


OTHER_DATA = {
    "another pixel": (loader(change=lambda x, y: x[3, 0, 0].add_(1e-3)), "data.first_pixels"),
    "another label": (loader(change=lambda x, y: y[3].fill_(0)), "data.first_labels"),
    "another order": (loader(change=lambda x, y: x.copy_(x.flip(0))), "data.first_pixels"),
    "as many batches of other images": (loader(15), "data.images is 16 in the checkpoint and 15 now"),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_resume_refuses_other_data(config, case):
    other, words = OTHER_DATA[case]
    finetune(network(3), None, loader(), None, config)
    with pytest.raises(CheckpointError, match=words):
        finetune(network(3), None, other, None, config, resume=True)
    assert finetune(network(3), None, loader(), None, config, resume=True).updates == 8  # the same is taken


def test_resume_refuses_a_list_of_batches_with_an_image_less(config):
    given = batches()
    finetune(network(3), None, given, None, config)
    less = [*given[:-1], tuple(part[:-1] for part in given[-1])]
    with pytest.raises(CheckpointError, match=r"data.images is 16 in the checkpoint and 15 now"):
        finetune(network(3), None, less, None, config, resume=True)
    assert finetune(network(3), None, given, None, config, resume=True).updates == 8


def test_data_that_differs_each_time_is_resumed_with_a_warning(config, caplog):
    class Noise(list):
        def __iter__(self):
            noise = torch.Generator()
            noise.seed()
            for images, labels in list.__iter__(self):
                yield images + torch.randn(images.shape, generator=noise), labels

    finetune(network(3), None, Noise(batches()), None, config)
    assert finetune(network(3), None, Noise(batches()), None, config, resume=True).updates == 8
    assert "not the same each time" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"epoch": 3}, {"epoch": 1.0}, {"epoch": True}, {"batch": 4}, {"batch": -1}, {"batch": None},
        {"update": 7}, {"update": 10**9}, {"count": -1}, {"sums": [1.0, "a"]}, {"sums": None},
        {"best": {"epoch": 0, "top1": 101}}, {"best": "high"}, {"history": 3}, {"history": [3]}, {"evaluations": {}},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_counters_are_refused(config, change):
    finetune(network(3), None, batches(), None, config)
    state = json.loads((open(f"{config.output_dir}/last/state.json")).read())
    write_json(f"{config.output_dir}/last/state.json", {**state, **change}, exact=True)
    with pytest.raises(CheckpointError, match=f"can't be resumed: {next(iter(change))}|can't be resumed: batch"):
        finetune(network(3), None, batches(), None, config, resume=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda optimizer: optimizer.update(state=True),
        lambda optimizer: optimizer.update(param_groups=3),
        lambda optimizer: optimizer.update(param_groups=[3]),
        lambda optimizer: optimizer.update(param_groups=[{"params": True}]),
        lambda optimizer: optimizer.clear(),
    ],
    ids=["state", "no groups", "a number as group", "no parameters", "empty"],
)
def test_a_damaged_optimizer_is_refused_in_one_line(config, damage):
    """Whatever torch raises about it; a checksum that fits it is no work for a stranger."""
    finetune(network(3), None, batches(), None, config)
    last = read_checkpoint(f"{config.output_dir}/last")
    damage(last.optimizer["optimizer"])
    write_checkpoint(last.path, last.tensors, last.state, last.optimizer)
    with pytest.raises(CheckpointError, match=r"last can't be resumed: \w+: ") as caught:
        finetune(network(3), None, batches(), None, config, resume=True)
    assert str(caught.value).isprintable()


def test_after_a_nan_statistics_are_those_of_the_last_good_update(config):
    given = batches(24, 4)
    config = replace(config, scheduler="constant", freeze_bn_stats=False)
    good = network(3, norm=True)
    with pytest.raises(TrainingError, match="not finite at update 4"):
        finetune(good, None, [*given[:3], (given[3][0] * float("nan"), given[3][1]), *given[4:]], None, config)
    expected = network(3, norm=True)
    finetune(expected, None, given, None, replace(config, output_dir=None, steps_per_epoch=3, epochs=1))
    for (name, buffer), other in zip(good.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert good[1].num_batches_tracked == 3


@pytest.mark.parametrize("label", [4, -1, -100])
def test_a_wrong_label_in_a_later_batch_is_named(config, label):
    given = batches()
    given[2][1][1] = label
    words = rf"labels must be \[batch\] from 0 to 3; image 1 of batch 2 of epoch 0 has {label}$"
    with pytest.raises(TrainingError, match=words):
        finetune(network(3), None, given, None, config)
    with pytest.raises(TrainingError, match=f"image 1 of batch 2 of the evaluation data has {label}$"):
        evaluate(network(3), given)
    mixed = replace(config, mixup=0.2, output_dir=None)
    with pytest.raises(TrainingError, match=words):
        finetune(network(3), None, given, None, mixed)


def test_a_folder_that_is_no_checkpoint_is_never_removed(config, tmp_path):
    for name in ("last", "best"):
        mine = tmp_path / "run" / name
        mine.mkdir(parents=True)
        (mine / "thesis.tex").write_text("years of work")
        with pytest.raises(CheckpointError, match=r"holds thesis.tex, which no checkpoint has"):
            finetune(network(3), None, batches(), batches(), replace(config, overwrite=True))
        assert (mine / "thesis.tex").read_text() == "years of work"
        (mine / "thesis.tex").rename(mine / "state.json")
        with pytest.raises(CheckpointError, match="is no checkpoint of timm-knapsack"):
            finetune(network(3), None, batches(), batches(), replace(config, overwrite=True))
        (mine / "state.json").unlink()
    finetune(network(3), None, batches(), batches(), replace(config, overwrite=True))  # empty ones are taken
    finetune(network(3), None, batches(), batches(), replace(config, overwrite=True))  # and its own replaced


RUN_AND_WAIT = """
import sys, test_finetune as t
from timm_knapsack.training.finetuning import FinetuneConfig, finetune

class Waiting(list):
    def __iter__(self):
        print("training", flush=True)
        sys.stdin.readline()
        yield from list.__iter__(self)

config = FinetuneConfig(epochs=1, distillation=t.PLAIN, output_dir=sys.argv[1])
finetune(t.network(3), None, Waiting(t.batches()), None, config)
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone(config):
    paths = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-c", RUN_AND_WAIT, config.output_dir]
    environment = {**os.environ, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as first:
        assert first.stdout.readline() == "training\n"
        with pytest.raises(CheckpointError, match=r"another run writes to .*run just now"):
            finetune(network(3), None, batches(), None, config)
        assert os.listdir(config.output_dir) == []  # it touched nothing
        first.kill()
    assert finetune(network(3), None, batches(), None, config).updates == 8  # a crash leaves no lock behind
    with pytest.raises(TrainingError):
        finetune(network(3), None, [], None, replace(config, overwrite=True))
    assert finetune(network(3), None, batches(), None, replace(config, overwrite=True)).updates == 8  # nor an error


def different_lengths(folder):
    from accelerate import PartialState

    process = PartialState(cpu=True).process_index
    for case, given in enumerate([[batches(), batches(8)], [batches(), []], [batches(), batches()]]):
        try:
            finetune(network(3), None, given[process], None, FinetuneConfig(epochs=1, distillation=PLAIN))
            outcome = f"{PartialState().num_processes} processes trained"
        except TrainingError as error:
            outcome = str(error)
        Path(folder, f"{case}.{process}").write_text(outcome)


def test_processes_with_loaders_of_different_length_are_told_before_the_first_step(tmp_path):
    in_two_processes(different_lengths, tmp_path)
    words = ["process 0 has 4 batches, process 1 has 2 batches;", "process 1 has 0 batches;", "2 processes trained"]
    for case, expected in enumerate(words):
        for process in (0, 1):
            assert expected in (tmp_path / f"{case}.{process}").read_text()
