"""compare: any mix of networks side by side."""

from typing import Annotated

import typer

from . import console
from .options import DataOptions, JsonOption, verb


@verb()
def compare(
    networks: Annotated[
        list[str],
        typer.Argument(help="timm names (NAME=WEIGHTS.safetensors), saved folders, ONNX files.", metavar="A B …"),
    ],
    data: DataOptions,
    runtimes: Annotated[
        str | None, typer.Option(help="Joined by commas; torch, onnxruntime and openvino, as installed, by default.")
    ] = None,
    time_batch: Annotated[int, typer.Option(help="Images in a timed batch.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    int8: Annotated[bool, typer.Option(help="Time networks as quantised by the runtimes that can.")] = False,
    seconds: Annotated[float, typer.Option(help="Time to measure each runtime for, at most, about.")] = 20.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each network in its own process.")] = True,
    pretrained: Annotated[bool, typer.Option(help="Load timm's weights; random ones otherwise.")] = True,
    picture: Annotated[
        str | None, typer.Option(help="Draw accuracy against time (.png or .svg).", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare networks: top-1, MACs, parameters, file size, measured time and peak memory in each runtime.

    Times are measured in turns; ratios to the first network come with their 95 % intervals.

    Example: timm-knapsack compare resnet18 mobilenetv3_small_050 --no-pretrained --runtimes torch --seconds 1
    """
    from ..costs.latency.conditions import MeasuringConditions
    from ..pipeline.compare import compare_networks, comparison_tables, draw_comparison
    from ..pipeline.progress import say

    conditions = MeasuringConditions(batch_size=time_batch, threads=threads, int8=int8, max_seconds=seconds)
    chosen = [name.strip() for name in runtimes.split(",")] if runtimes else None
    reading = data.loader_options() if data.source is not None else {}
    found = compare_networks(
        networks, data.source, runtimes=chosen, conditions=conditions, pretrained=pretrained, memory=memory,
        say=say, **reading,
    )  # fmt: skip
    if picture is not None:
        draw_comparison(found, picture)
    if as_json:
        about = {"batch_size": time_batch, "threads": threads, "int8": int8, "data": data.source}
        console.print_json({**about, "networks": [one.facts() for one in found]})
        return
    for head, rows in comparison_tables(found):
        console.print_table(head, rows)
