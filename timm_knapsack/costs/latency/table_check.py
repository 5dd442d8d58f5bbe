"""Whether the data of a latency table's file can be one: the file may come from another machine, or from a stranger."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import LatencyError
from ...files.plain_json import shortened

PLANS = ("stairs", "grid")
MAX_COUNT = 2**20  # units of a group, stairs
MAX_SECONDS = 1e6


def check_table(data: Mapping[str, Any]) -> None:
    """Raises a LatencyError that names the first value that no table holds."""
    for key in ("model", "shapes", "date"):
        _require(isinstance(data[key], str), key, data[key], "text")
    _require(_is_seconds(data["seconds"]), "seconds", data["seconds"], "a number of seconds")
    _require(isinstance(data["complete"], bool), "complete", data["complete"], "true or false")
    versions = data["versions"]
    _require(isinstance(versions, dict) and _all(versions.values(), str), "versions", versions, "texts by name")
    _check_conditions(data["conditions"])
    layers = data["layers"]
    _require(isinstance(layers, list) and _all(layers, str), "layers", layers, "names of layers")
    stairs = data["stairs"]
    fits = stairs is None or (isinstance(stairs, dict) and all(_is_count(n) for n in stairs.values()))
    _require(fits, "stairs", stairs, "a number of channels for each kind of layer")
    _check_grid(data["grid"])
    _require(isinstance(data["visits"], list), "visits", data["visits"], "a list")
    for number, visit in enumerate(data["visits"]):
        _check_visit(visit, f"visits[{number}]", len(data["layers"]), len(data["grid"]))
    if data["complete"]:
        seen = any(visit["plan"] == "grid" for visit in data["visits"])
        _require(bool(data["layers"] and data["grid"] and seen and stairs is not None), "complete", True, "visits then")


def _check_conditions(conditions: Any) -> None:
    _require(isinstance(conditions, dict), "conditions", conditions, "an object")
    texts = dict.fromkeys(("device", "device_name", "dtype", "memory_format", "timer", "runtime"), str)
    kinds = {**texts, "int8": bool, "compiled": bool}
    for key, value in conditions.items():
        if key in kinds:
            _require(isinstance(value, kinds[key]), f"conditions.{key}", value, kinds[key].__name__)
        elif key in ("threads", "batch_size"):
            _require(_is_count(value), f"conditions.{key}", value, "a whole number from 1")
    size = conditions.get("input_size")
    _require(isinstance(size, list) and all(_is_count(n) for n in size), "conditions.input_size", size, "sizes")
    _require(len(size) == 3 and math.prod(size) <= 2**26, "conditions.input_size", size, "channels, height, width")
    dtype = getattr(torch, str(conditions.get("dtype")), None)
    _require(isinstance(dtype, torch.dtype), "conditions.dtype", conditions.get("dtype"), "a dtype of torch")


def _check_grid(grid: Any) -> None:
    fits = isinstance(grid, list) and all(isinstance(row, list) for row in grid)
    _require(fits, "grid", grid, "a list of widths for each copy")
    for number, row in enumerate(grid):
        fits = len(row) == len(grid[0]) and all(_is_count(n) for n in row)
        _require(fits, f"grid[{number}]", row, f"{len(grid[0])} whole numbers from 1")


def _check_visit(visit: Any, place: str, layers: int, copies: int) -> None:
    _require(isinstance(visit, dict), place, visit, "an object")
    for key in ("plan", "round", "copy", "reference", "layers"):
        _require(key in visit, place, visit, f"the key {key}")
    _require(visit["plan"] in PLANS, f"{place}.plan", visit["plan"], " or ".join(PLANS))
    for key in ("round", "copy"):
        value = visit[key]
        _require(type(value) is int and 0 <= value < MAX_COUNT, f"{place}.{key}", value, "a whole number")
    if visit["plan"] == "grid":
        _require(visit["copy"] < copies, f"{place}.copy", visit["copy"], f"one of the {copies} copies of the grid")
    reference, times, total = visit["reference"], visit["layers"], visit.get("total")
    _require(_is_seconds(reference) and reference > 0, f"{place}.reference", reference, "seconds")
    fits = isinstance(times, list) and len(times) == layers + 1 and all(_is_seconds(value) for value in times)
    _require(fits, f"{place}.layers", times, f"{layers + 1} times in seconds")
    _require(total is None or (_is_seconds(total) and total > 0), f"{place}.total", total, "seconds")


def _require(fits: bool, place: str, value: Any, expected: str) -> None:
    if not fits:
        raise LatencyError(f"{place} is {shortened(value)}, expected {expected}")


def _all(values, kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_COUNT


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS
