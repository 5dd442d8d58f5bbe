"""compare_networks(): any mix of networks side by side: accuracy, counted costs, size, measured time and memory.

Times are measured in turns, all networks in one runtime after the other, each on images of its own size, so that the
ratios hold on a machine that others use, too.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..costs.counted import count_macs, count_params
from ..costs.latency.conditions import MeasuringConditions
from ..costs.latency.layer_timing import Conditions
from ..costs.latency.network_timing import on_images, time_in_turns
from ..errors import KnapsackError
from ..export.exporter import in_batches
from ..export.preprocessing import data_config
from ..human_numbers import human
from ..images.loaders import create_loader
from ..models.model_source import ModelSource
from ..reports.pictures import chart
from ..runtimes.kinds import RUNTIMES, open_runtime
from ..runtimes.onnx_graph import count_onnx, input_shape, metadata_of, read_onnx
from ..runtimes.runtime import AsModule, Run
from ..training.evaluation import evaluate
from .memory_probe import peak_memory

USUAL = ("torch", "onnxruntime", "openvino")  # measured where they are installed, unless others are named


@dataclass
class Contender:
    """One network of a comparison: a timm model, a saved one, or an ONNX file; and what was found about it.

    Attributes:
        seconds: for each runtime, ``{"median", "ratio", "low", "high"}``; ratio to the first network, with its 95 %
            interval. None where the runtime can't run it.
        memory: for each runtime, peak bytes while it runs.
    """

    name: str
    source: ModelSource | None = None
    module: nn.Module | None = None
    onnx: bytes | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # how its images are prepared, where there is no module
    fixed_batch: int | None = None
    macs: int = 0
    params: int = 0
    bytes: int = 0
    top1: float | None = None
    samples: int = 0
    seconds: dict[str, dict[str, float] | None] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What was found, as plain data."""
        names = ("name", "top1", "samples", "macs", "params", "bytes", "seconds", "memory")
        return {name: getattr(self, name) for name in names}


def open_contender(text: str, pretrained: bool = True) -> Contender:
    """A network by a timm name, ``NAME=WEIGHTS.safetensors``, a folder, ``hf-hub:…`` or an ONNX file.

    Example:
        >>> open_contender("resnet20-half").macs == count_macs(result.model)
        True
    """
    if text.endswith(".onnx"):
        return _open_onnx(Path(text).expanduser())
    name, _, weights = text.partition("=")
    source = ModelSource(name, pretrained=pretrained, weights=weights or None)
    model = source.load()
    file = Path(source.name.removeprefix("local-dir:")) / "model.safetensors"
    held = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    size = file.stat().st_size if file.exists() else Path(weights).stat().st_size if weights else held
    counted = {"macs": count_macs(model), "params": count_params(model), "bytes": size}
    return Contender(Path(name).name or name, source, model, **counted)


def _open_onnx(path: Path) -> Contender:
    proto = read_onnx(path)
    _, shape = input_shape(proto)
    if len(shape) != 4 or None in shape[1:]:
        raise KnapsackError(f"{path} takes {shape}; compare needs images of a fixed size: [batch, 3, height, width]")
    config = data_config(metadata_of(proto)) or {"input_size": shape[1:]}
    counted = {**count_onnx(proto, shape[0] or 1), "bytes": path.stat().st_size}
    name = f"{path.parent.name}/{path.name}" if path.stem == "model" else path.name
    return Contender(name, onnx=path.read_bytes(), config=config, fixed_batch=shape[0], **counted)


def compare_networks(
    names: Sequence[str],
    data: Any = None,
    *,
    runtimes: Sequence[str] | None = None,
    conditions: MeasuringConditions | None = None,
    pretrained: bool = True,
    memory: bool = True,
    say: Callable[[str], Any] = lambda line: None,
    **reading: Any,
) -> list[Contender]:
    """Compare networks: top-1, MACs, parameters, file size, measured time and peak memory in each runtime.

    Args:
        names: at least one of what `open_contender` takes; ratios are to the first.
        data: images with labels, as `create_loader` takes them; each network gets them as it was trained to. None
            leaves accuracies out.
        runtimes: "torch", "onnxruntime", "openvino" … ; by default those three, as far as they are installed.
        conditions: batch size, threads, int8, how long to measure each runtime.
        memory: measure peak memory, each network in a process of its own.
        reading: further options of `create_loader`.

    Example:
        >>> rows = compare_networks(["resnet20-half", "resnet20-half"], runtimes=["torch"], memory=False,
        ...     conditions=MeasuringConditions(max_seconds=0.1))
        >>> rows[0].seconds["torch"].get("ratio")
        1.0
    """
    if not names:
        raise KnapsackError("compare needs at least one network: a timm name, a folder or an ONNX file")
    if runtimes is None:
        runtimes = [name for name in USUAL if all(find_spec(package) for package in RUNTIMES[name].packages)]
    for name in runtimes:
        open_runtime(name)  # what is missing is said before hours of work
    asked = conditions or MeasuringConditions()
    contenders = [open_contender(name, pretrained) for name in names]
    _tell_apart(contenders)
    if data is not None:
        for one in contenders:
            metrics = _accuracy(one, data, reading)
            one.top1, one.samples = metrics["top1"], metrics["samples"]
            say(f"{one.name}: top-1 {one.top1:.2f} % on {one.samples} images")
    for name in runtimes:
        _time(contenders, name, asked, memory)
        say(f"{name}: measured")
    return contenders


def _tell_apart(contenders: Sequence[Contender]) -> None:
    """Networks of the same name get numbers."""
    names = [one.name for one in contenders]
    for name in {name for name in names if names.count(name) > 1}:
        numbers = count(1)
        for one in contenders:
            if one.name == name:
                one.name = f"{name} ({next(numbers)})"


def _accuracy(one: Contender, data: Any, reading: Mapping[str, Any]) -> dict[str, float]:
    loader = create_loader(data, one.module if one.module is not None else one.config, **reading, labels="required")
    if one.module is not None:
        return evaluate(one.module, loader)
    run = open_runtime("onnxruntime").start(one.onnx, torch.empty(0))
    return evaluate(AsModule(in_batches(run, one.fixed_batch) if one.fixed_batch else run), loader)


# ---- on the device ------------------------------------------------------------------------------------------------


def _time(contenders: Sequence[Contender], name: str, asked: MeasuringConditions, memory: bool) -> None:
    """All networks that this runtime can run, in turns."""
    asked = MeasuringConditions.read(asked, runtime=name, int8=asked.int8 and RUNTIMES[name].takes_int8)
    runs: dict[int, Run] = {}
    first = None
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(contenders):
            one.seconds[name] = one.memory[name] = None
            conditions = _conditions(one, asked)
            if conditions is None:
                continue
            first = first or conditions
            runtime, images = conditions.open_runtime(), conditions.images()
            with conditions.active():
                converted = one.onnx if one.module is None else runtime.convert(conditions.copied(one.module), images)
                runs[number] = on_images(runtime.start(converted, images), images)
            if memory:
                file = Path(folder) / str(number)
                if isinstance(converted, bytes):
                    file.write_bytes(converted)
                given = {"file": str(file)} if file.exists() else {"source": one.source}
                options = {"threads": conditions.threads, "int8": conditions.int8}
                one.memory[name] = peak_memory(name, images.shape, **given, **options)
    if not runs:
        return
    limits = {"precision": asked.precision, "max_seconds": asked.seconds(20.0)}
    found = time_in_turns(first, list(runs.values()), **limits)
    for number, latency, ratio, error in zip(runs, found.latencies, found.ratios, found.uncertainty, strict=True):
        interval = {"low": ratio * (1 - error), "high": ratio * (1 + error)}
        contenders[number].seconds[name] = {"median": latency.median, "ratio": ratio, **interval}


def _conditions(one: Contender, asked: MeasuringConditions) -> Conditions | None:
    """Under which a network runs; None where this runtime can't run it."""
    if one.module is not None:
        return Conditions.of(one.module, asked)
    if not RUNTIMES[asked.runtime].reads_onnx or (one.fixed_batch or asked.batch_size) != asked.batch_size:
        return None
    given = MeasuringConditions.read(asked, input_size=tuple(one.config["input_size"]), int8=False)  # it is as it is
    return Conditions.of(nn.Identity(), given)


# ---- for people ---------------------------------------------------------------------------------------------------


def comparison_tables(contenders: Sequence[Contender]) -> list[tuple[list[str], list[list[str]]]]:
    """Two tables as head and rows: what was counted, and what was measured in each runtime.

    Example:
        >>> comparison_tables([Contender("a", top1=70.0, macs=10**9, params=10**6, bytes=4 * 10**6)])[0][1]
        [['a', '70.00 %', '1.00 G', '1.00 M', '4.00 MB']]
    """
    counted = [
        [
            *(one.name, "–" if one.top1 is None else f"{one.top1:.2f} %"),
            *(human(one.macs), human(one.params), human(one.bytes, "B")),
        ]
        for one in contenders
    ]
    measured = []
    for name in dict.fromkeys(name for one in contenders for name in one.seconds):
        for one in contenders:
            time, held = one.seconds.get(name), one.memory.get(name)
            texts = ["–", "–"]
            if time is not None:
                texts = [human(time["median"], "s"), f"{time['ratio']:.3f} ({time['low']:.3f} to {time['high']:.3f})"]
            measured.append([name, one.name, *texts, "–" if held is None else human(held, "B")])
    return [
        (["network", "top-1", "MACs", "params", "file"], counted),
        (["runtime", "network", "time", "÷ first (95 %)", "peak memory"], measured),
    ]


def draw_comparison(contenders: Sequence[Contender], path: str | Path) -> None:
    """Accuracy (or without images MACs) against time, a series for each runtime."""
    accurate = any(one.top1 is not None for one in contenders)
    series = []
    for name in dict.fromkeys(name for one in contenders for name in one.seconds):
        timed = [one for one in contenders if one.seconds.get(name) and (one.top1 is not None or not accurate)]
        if timed:
            y = [one.top1 if accurate else one.macs / 1e6 for one in timed]
            x = [one.seconds[name]["median"] * 1e3 for one in timed]
            series.append({"x": x, "y": y, "label": name, "style": "points", "names": [one.name for one in timed]})
    if not series:
        raise KnapsackError("there is nothing to draw: no network was measured in any runtime")
    y_label = "top-1, %" if accurate else "million MACs"
    chart(series, x_label="ms for one batch", y_label=y_label, title="Networks compared", path=path)
