"""Several processes: what is equal on two and on one, what is refused, and how a run ends when a process dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import in_two_processes
from test_finetune import data, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from timm_knapsack.errors import TrainingError
from timm_knapsack.training.config import FinetuneConfig
from timm_knapsack.training.distillation import DistillationConfig
from timm_knapsack.training.finetuning import finetune
from timm_knapsack.training.processes import batchnorm_synchronised, check_distribution

OPEN = DistillationConfig(ikd_weight=1.0, ikd_at="convs")


def outcome(accelerator, images, drop_last, **options):
    """A run that leaves everything open, on images that two processes can't share evenly."""
    size = 8 // accelerator.num_processes
    loader = DataLoader(TensorDataset(*data(images)), batch_size=size, shuffle=True, drop_last=drop_last)
    config = FinetuneConfig(**{"epochs": 2, "distillation": OPEN, "grad_accumulation": 2, "log_interval": 1, **options})
    student, teacher = network(3, 1, norm=True), network(6, norm=True)
    result = finetune(student, teacher, loader, [data(10, seed=3)], config, accelerator=accelerator)
    weights = torch.cat([value.double().flatten() for value in result.model.state_dict().values()])
    everyone = accelerator.gather(weights[None])
    return {
        "processes": accelerator.num_processes,
        "identical": bool((everyone == everyone[:1]).all()),
        "choices": result.config.choices(),
        "losses": [row["total"] for row in result.history],
        "evaluations": result.evaluations,
    }


def all_outcomes(accelerator):
    return {
        "even": outcome(accelerator, 35, True),  # 3 images are left out of every epoch, on one process and on two
        "uneven": outcome(accelerator, 30, False),  # Accelerate repeats two images on two processes
        "mixed": outcome(accelerator, 32, True, mixup=0.5, ema_decay=0.9),
        "own statistics": outcome(accelerator, 32, True, freeze_bn_stats=False, lr=0.01),
    }


def worker(folder):
    from accelerate import Accelerator

    torch.set_num_threads(1)
    found = all_outcomes(Accelerator(cpu=True))
    if int(os.environ["RANK"]) == 0:
        Path(folder, "outcome.json").write_text(json.dumps(found))


def test_two_processes_against_one(tmp_path):
    from accelerate import Accelerator

    in_two_processes(worker, tmp_path)
    two = json.loads((tmp_path / "outcome.json").read_text())
    one = all_outcomes(Accelerator(cpu=True))
    for name, found in two.items():
        assert (one[name]["processes"], found["processes"]) == (1, 2)
        assert found["identical"], name  # whatever differs from one process, no process differs from another
        assert len(found["losses"]) == len(one[name]["losses"]), name
    # equal: what was chosen, and every loss, with frozen statistics (chosen: few updates) and equal batches
    assert two["even"]["choices"]["freeze_bn_stats"] is True and two["even"]["choices"]["lr"] > 0
    assert two["even"]["choices"]["lr"] == pytest.approx(one["even"]["choices"]["lr"], rel=0.01)
    assert two["even"]["losses"] == pytest.approx(one["even"]["losses"], abs=1e-3)
    assert two["uneven"]["losses"][0] == pytest.approx(one["uneven"]["losses"][0], abs=1e-3)  # before the repeats
    # not equal, as docs/training.md says: partners of mixup, BatchNorm's own statistics
    for name in ("mixed", "own statistics"):
        assert two[name]["losses"] != pytest.approx(one[name]["losses"], abs=1e-4), name


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_other_kinds_of_distribution_are_refused_with_a_reason(kind):
    with pytest.raises(TrainingError, match=rf"does not run under {kind}: .*recipes/accelerate/gpu8.yaml"):
        check_distribution(SimpleNamespace(distributed_type=kind))
    check_distribution(SimpleNamespace(distributed_type="MULTI_GPU"))


def test_accelerate_itself_names_them_so():
    from accelerate.utils import DistributedType

    assert {DistributedType.FSDP.value, DistributedType.DEEPSPEED.value} == {"FSDP", "DEEPSPEED"}


def test_synchronised_batchnorm_is_given_back():
    student = network(3, norm=True)
    own = [module for module in student.modules() if isinstance(module, nn.BatchNorm2d)]
    gpu = SimpleNamespace(num_processes=2, device=torch.device("cuda"))
    with batchnorm_synchronised(student, gpu, True):
        synchronised = [module for module in student.modules() if isinstance(module, nn.SyncBatchNorm)]
        assert len(synchronised) == len(own) == 2 and type(student[1]) is nn.SyncBatchNorm
        assert synchronised[0].weight is own[0].weight and synchronised[0].running_mean is own[0].running_mean
    assert [student[1], student[4]] == own
    cpu = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with pytest.raises(TrainingError, match="sync_bn needs GPUs"), batchnorm_synchronised(student, cpu, True):
        pass


def mortal(folder):
    """Process 1 is killed by the third batch it reads in training."""
    torch.set_num_threads(1)

    class Killing(TensorDataset):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            if self.read > 20 and int(os.environ["RANK"]) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    loader = DataLoader(Killing(*data(32)), batch_size=4)
    config = FinetuneConfig(
        epochs=50, lr=0.01, output_dir=folder, checkpoint_every=1,
        distillation=DistillationConfig(ikd_weight=0, kd_weight=0),
    )  # fmt: skip
    finetune(network(3), None, loader, None, config)


def test_a_process_that_dies_ends_the_other_with_a_message(tmp_path):
    """Without a launcher's help: two processes, started by hand, one of which is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, __file__, str(tmp_path / "run")]
    both = [
        subprocess.Popen(command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        assert both[1].wait(timeout=200) == -signal.SIGKILL
        died = time.monotonic()
        message = both[0].communicate(timeout=60)[1]
        assert time.monotonic() - died < 60
    finally:
        for process in both:
            process.kill()
    assert both[0].returncode != 0
    assert "another of the 2 processes has ended" in message and "the last checkpoint is" in message.lower()


if __name__ == "__main__":
    mortal(sys.argv[1])
