"""What is attacked: for each kind of file a whole one, the way to damage it, and what a user does with it."""

import io
import json
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mutations import damaged_bytes, damaged_data, damaged_json, damaged_safetensors, damaged_yaml
from torch import nn

import timm_knapsack as tk
from timm_knapsack.costs.latency.layer_timing import Conditions
from timm_knapsack.costs.latency.plan import find_timed_layers, grid_plan
from timm_knapsack.costs.latency.table import LatencyTable
from timm_knapsack.hub.model_card import model_card
from timm_knapsack.models.model_source import ModelSource
from timm_knapsack.pipeline.recipe import Recipe
from timm_knapsack.reports import charts, page
from timm_knapsack.reports.run_record import RunRecord
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.slim.tensor_files import write_tensors
from timm_knapsack.training.checkpoints import read_checkpoint
from timm_knapsack.training.distillation import DistillationConfig
from timm_knapsack.training.finetuning import FinetuneConfig, finetune
from timm_knapsack.values.curves import GroupCurve, ValueCurves
from timm_knapsack.values.valuation import load_values

import timm  # isort: skip


@dataclass(frozen=True)
class Target:
    """One kind of file.

    Attributes:
        prepare: writes whole files into a folder; returns the one that is damaged, and more that ``use`` needs.
        damage: the damaged file's bytes, from its whole bytes.
        use: what a user does with it; whatever it raises must be a KnapsackError.
    """

    prepare: Callable[[Path], tuple[Path, Any]]
    damage: Callable[[random.Random, bytes], bytes]
    use: Callable[[Path, Any, int], Any]


def network(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)).eval()


def grouped() -> tuple[nn.Module, Any]:
    net = network()
    return net, tk.find_channel_groups(net, torch.zeros(1, 3, 8, 8))


# ---- a saved model


def saved_model(folder: Path) -> Path:
    torch.manual_seed(0)
    base = timm.create_model("cifar_resnet8x2", channels=(4, 4, 4)).eval()
    groups = tk.find_channel_groups(base)
    scores = tk.taylor_scores(base, groups, criterion="random")
    options = {"budget": tk.Budget(macs=0.5), "groups": groups, "base_args": {"channels": (4, 4, 4)}}
    result = tk.prune(base, scores=scores, **options)
    result = replace(result, report=replace(result.report, seconds=1.0))  # a mutation's number stands for one file
    saved = tk.save_pretrained(result, folder / "net", notes=["a note"])
    RunRecord.of_pruning(result, {"name": "cifar_resnet8x2"}).save(saved)
    return saved


def prepare_config(folder: Path) -> tuple[Path, Any]:
    saved = saved_model(folder)
    return saved / "config.json", saved


def use_config(path: Path, saved: Path, number: int) -> None:
    if number % 2:
        ModelSource(str(saved)).load()
    else:
        model_card(saved)


def prepare_channels(folder: Path) -> tuple[Path, Any]:
    saved = saved_model(folder)
    return saved / "channels.json", saved


def use_channels(path: Path, saved: Path, number: int) -> None:
    config = ChannelConfig.load(path)
    if number % 4 == 0:
        timm.create_model("knapsack_pruned", channels=config)


def prepare_weights(folder: Path) -> tuple[Path, Any]:
    saved = saved_model(folder)
    return saved / "model.safetensors", saved


def use_weights(path: Path, saved: Path, number: int) -> None:
    ModelSource(str(saved)).load()


# ---- values and costs


def prepare_scores(folder: Path) -> tuple[Path, Any]:
    net, groups = grouped()
    tk.taylor_scores(net, groups, criterion="random").save(folder / "scores.safetensors")
    return folder / "scores.safetensors", groups


def prepare_curves(folder: Path) -> tuple[Path, Any]:
    _, groups = grouped()
    curves = {}
    for group in groups:
        error = torch.linspace(4, 0, group.size + 1).double().numpy()
        counts, loss = torch.tensor([1, 3]).numpy(), torch.tensor([0.3, 0.1]).double().numpy()
        curves[group.name] = GroupCurve(torch.randperm(group.size).numpy(), error, counts, loss, note="a note")
    ValueCurves(curves, model="net", data="images", samples=3).save(folder / "values.safetensors")
    return folder / "values.safetensors", groups


def use_values(path: Path, groups: Any, number: int) -> None:
    values = load_values(path, groups if number % 2 else None)
    if number % 2:
        for group in groups:
            values.checked(groups).ladder(group)


def prepare_table(folder: Path) -> tuple[Path, Any]:
    from timm_knapsack.costs.latency.table import _digest

    net, groups = grouped()
    conditions = Conditions.of(net, input_size=(3, 8, 8))
    layers = find_timed_layers(net, groups, conditions)
    grid = grid_plan(groups, layers, [1] * len(groups))
    times = [1e-5] * (len(layers) + 1)
    common = {"reference": 1e-4, "layers": times, "total": 1.1e-4}
    visits = [{"plan": "grid", "round": r, "copy": c, **common} for r in range(2) for c in range(len(grid))]
    names = [layer.name for layer in layers]
    measured = {"conv": 1}, grid, visits, 1.0, True, {"torch": "2"}
    table = LatencyTable("net", _digest(groups), conditions, names, *measured)
    table.save(folder / "table.json")
    return folder / "table.json", (net, groups)


def use_table(path: Path, networks: Any, number: int) -> None:
    table = LatencyTable.load(path, elsewhere=True)
    str(table)
    if number % 4 == 0:
        cost = table.cost(*networks)
        assert cost.at(networks[1].sizes) >= 0


# ---- recipes, records, checkpoints

RECIPE = """
name: resnet20_half
about: a small one
model: {name: cifar_resnet20, pretrained: false, args: {num_classes: 10}}
data: {source: images, input_size: 32, num_workers: 0}
budget: {macs: 0.5, params: 1.0e5}
score: {criterion: abs, images: 64, batch_size: 8}
latency: {device: cpu, seconds: 3.0}
prune: {round_to: 2, min_keep: 0.1, ignore: [conv1]}
recover: {images: 8}
finetune:
  epochs: 2
  lr: 0.02
  optimizer: sgd
  optimizer_args: {momentum: 0.9}
  trackers: []
  mixup: 0.1
  output_dir: runs
  distillation: {ikd_weight: 20, ikd_at: blocks}
paper: {top1: 91.0}
seed: 3
"""


def prepare_recipe(folder: Path) -> tuple[Path, Any]:
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml", None


def use_recipe(path: Path, _: Any, number: int) -> None:
    Recipe.load(path)


def prepare_record(folder: Path) -> tuple[Path, Any]:
    record = RunRecord.load(saved_model(folder))
    history = [{"epoch": 0, "update": i, "lr": 0.1, "total": 1.0, "ce": 1.0, "kd": 0.1, "ikd": 0.1} for i in range(3)]
    evaluations = [{"epoch": 1, "update": 3, "top1": 50.0, "top5": 90.0, "loss": 1.0, "samples": 10}]
    record.finetune = {"config": asdict(FinetuneConfig()), "history": history, "evaluations": evaluations, "updates": 3}
    record.add_evaluation("original", {"top1": 60.0, "top5": 95.0, "samples": 10}, "images")
    record.add_evaluation("pruned", {"top1": 50.0, "top5": 90.0, "samples": 10}, "images")
    record.latency = {"original": 0.1, "pruned": 0.05, "batch_size": 1, "threads": 1, "device": "cpu"}
    record.sweep = [{"what": "half", "macs": 1e6, "top1": 50.0, "kind": "pruned"}]
    alone = folder / "alone"
    alone.mkdir()
    charts.find_spec = lambda name: None  # no pictures: matplotlib takes a second for each
    return record.save(alone), alone


def use_record(path: Path, folder: Path, number: int) -> None:
    page.write_report(folder)


PLAIN = DistillationConfig(kd_weight=0, ikd_weight=0)


def training(folder: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(2)]
    config = FinetuneConfig(epochs=1, lr=0.01, distillation=PLAIN, output_dir=str(folder / "run"), ema_decay=0.9)
    return {"student": network(3), "teacher": None, "train_loader": batches, "config": config}


def prepare_checkpoint(folder: Path) -> tuple[Path, Any]:
    finetune(**training(folder))
    shutil.copytree(folder / "run", folder / "whole")
    return folder / "whole" / "last" / "state.json", folder


def damage_checkpoint(rng: random.Random, data: bytes) -> bytes:
    return damaged_json(rng, data)


def use_checkpoint(path: Path, folder: Path, number: int) -> None:
    """Of ten, nine damage state.json and one another file, whose checksum a stranger would put right."""
    last = folder / "run" / "last"
    shutil.rmtree(folder / "run")
    shutil.copytree(folder / "whole", folder / "run")
    if number % 10 == 0:
        (path.parent / "state.json").write_bytes(folder.joinpath("state.whole").read_bytes())
        _damage_another(random.Random(number), last, folder)
    if number % 5 == 0:
        finetune(**training(folder), resume=True)
    else:
        read_checkpoint(last)


def _damage_another(rng: random.Random, last: Path, folder: Path) -> None:
    state = json.loads((folder / "state.whole").read_bytes())
    name = rng.choice(sorted(state["files"]))
    data = (last / name).read_bytes()
    if name.endswith(".safetensors"):
        data = damaged_safetensors(rng, data)
    elif rng.random() < 0.5:
        data = damaged_bytes(rng, data)
    else:
        plain = torch.load(last / name, weights_only=True)
        torch.save(damaged_data(rng, plain), last / name)
        data = (last / name).read_bytes()
    (last / name).write_bytes(data)
    state["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (last / "state.json").write_text(json.dumps(state))


def prepare_weights_file(folder: Path) -> tuple[Path, Any]:
    net = network()
    return write_tensors(folder / "weights.safetensors", net.state_dict()), net


def use_weights_file(path: Path, net: nn.Module, number: int) -> None:
    from timm_knapsack.models.model_source import load_weights

    load_weights(net, path)


def prepare_pth_file(folder: Path) -> tuple[Path, Any]:
    net = network()
    torch.save({"epoch": 3, "state_dict": net.state_dict()}, folder / "weights.pth")
    return folder / "weights.pth", net


def damaged_pth(rng: random.Random, data: bytes) -> bytes:
    """The bytes of the zip, or the data in its pickle."""
    if rng.random() < 0.5:
        return damaged_bytes(rng, data)
    plain = torch.load(io.BytesIO(data), weights_only=True)
    damaged = damaged_data(rng, {**plain, "state_dict": dict(plain["state_dict"])})
    try:
        torch.save(damaged, new := io.BytesIO())
    except RecursionError:  # nested deeper than torch writes
        return damaged_bytes(rng, data)
    return new.getvalue()


TARGETS = {
    "config.json": Target(prepare_config, damaged_json, use_config),
    "channels.json": Target(prepare_channels, damaged_json, use_channels),
    "scores": Target(prepare_scores, damaged_safetensors, use_values),
    "value curves": Target(prepare_curves, damaged_safetensors, use_values),
    "latency tables": Target(prepare_table, damaged_json, use_table),
    "recipes": Target(prepare_recipe, damaged_yaml, use_recipe),
    "checkpoints": Target(prepare_checkpoint, damage_checkpoint, use_checkpoint),
    "run records": Target(prepare_record, damaged_json, use_record),
    "saved weights": Target(prepare_weights, damaged_safetensors, use_weights),
    "weights files": Target(prepare_weights_file, damaged_safetensors, use_weights_file),
    ".pth files": Target(prepare_pth_file, damaged_pth, use_weights_file),
}
