"""Value curves: what the network loses at each width of each group, its readers refitted; a safetensors file."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ScoreError, first_line
from ..files.plain_json import shortened
from ..human_tables import html_table
from ..slim.channel_groups import ChannelGroup, ChannelGroups
from ..slim.tensor_files import write_tensors
from .group_values import GroupValues, Ladder
from .value_files import read_values

FORMAT = "timm-knapsack/values"
TINY = 1e-12
# Losses of several groups do not add up: what a whole network would make up for, a network that is cut everywhere does
# not. So powers of them are added up. Below 1 the choice takes all of a few groups, above 1 a little of each; what
# suits a network is found out by trial (pipeline/trials.py), and this is where the trials begin.
POWER = 1.3
# What a given cut loses is another question than which cut to choose. Groups that are cut together lose more than one
# by one, and a power below 1 of their losses says how much: with ResNet-56, cut at random in 20 ways, 0.6 ranks the
# networks best (0.5 to 1 rank nearly as well) and comes within a factor of 1 to 3.5 of the loss, where the plain sum is
# 3 to 20 times too low (benchmarks/predicted_loss.py). A choice by 0.6 takes all of those groups whose curves happen to
# be measured too low, so it is no use as an objective.
TOGETHER = 0.6
SLOPES = (0.5, 3.0)  # exponents of the power law outside of the measured widths: nearly linear, never flat


@dataclass(frozen=True)
class GroupCurve:
    """What one group's widths cost.

    Attributes:
        order: its units in the order in which they go.
        error: [size + 1], squared error of the refitted readers with n units kept; the shape of the curve.
        counts: widths at which the loss of the whole network was measured, ascending; the scale of the curve.
        loss: the loss measured there: KL divergence from the original's outputs on images that were not fitted.
        note: what could not be refitted, and why.

    Example:
        >>> curve = GroupCurve(np.array([1, 0]), np.array([4.0, 1.0, 0.0]), np.array([1]), np.array([0.1]))
        >>> curve.losses().round(3)           # with 0, 1 and 2 units kept
        array([0.4, 0.1, 0. ])
    """

    order: np.ndarray
    error: np.ndarray
    counts: np.ndarray
    loss: np.ndarray
    note: str = ""

    @property
    def size(self) -> int:
        return len(self.order)

    def losses(self) -> np.ndarray:
        """[size + 1]: the loss with n units kept; a power law of the error between the measured widths."""
        x = np.log(np.maximum(self.error[self.counts], TINY))[::-1]  # ascending: the widest first
        y = np.maximum.accumulate(np.log(np.maximum(self.loss, TINY))[::-1])
        x, first = np.unique(x, return_index=True)
        y = y[first]
        at = np.log(np.maximum(self.error, TINY))
        result = np.interp(at, x, y)
        inner = np.diff(y) / np.diff(x) if len(x) > 1 else np.ones(1)
        below, above = at < x[0], at > x[-1]
        result[below] = y[0] + np.clip(inner[0], 1.0, SLOPES[1]) * (at[below] - x[0])
        result[above] = y[-1] + np.clip(inner[-1], *SLOPES) * (at[above] - x[-1])
        losses = np.exp(result)
        losses[self.size] = 0.0
        return losses

    def hull(self, power: float = POWER) -> np.ndarray:
        """[size + 1]: the least convex curve below a power of the losses, which the solver works on."""
        losses = self.losses() ** power
        corners = [1]
        for n in range(2, self.size + 1):
            while len(corners) > 1 and _is_above(losses, corners[-2], corners[-1], n):
                corners.pop()
            corners.append(n)
        flat = np.interp(np.arange(self.size + 1), corners, losses[corners])
        flat[0] = losses[0]
        return flat


def _is_above(losses: np.ndarray, left: int, middle: int, right: int) -> bool:
    chord = losses[left] + (losses[right] - losses[left]) * (middle - left) / (right - left)
    return losses[middle] >= chord


class ValueCurves(dict, GroupValues):
    """``{group name: GroupCurve}`` with where they come from; one set serves any number of budgets.

    Example:
        >>> curves = value_curves(model, groups, loader)
        >>> curves.save("values.safetensors")
        >>> curves = ValueCurves.load("values.safetensors", groups)
    """

    def __init__(
        self,
        curves: Mapping[str, GroupCurve],
        *,
        model: str = "",
        data: str = "",
        samples: int = 0,
        power: float = POWER,
    ):
        super().__init__(curves)
        self.model, self.data, self.samples, self.power = model, data, samples, power

    def with_power(self, power: float) -> "ValueCurves":
        """The same curves, of whose losses another power is added up.

        Example:
            >>> ValueCurves({}).with_power(2.0).power
            2.0
        """
        return ValueCurves(self, model=self.model, data=self.data, samples=self.samples, power=power)

    def __repr__(self):
        return f"ValueCurves({len(self)} groups of {self.model or 'a model'}, {self.samples} images)"

    def _repr_html_(self) -> str:
        shares, rows = (0.75, 0.5, 0.25), []
        for name, curve in self.items():
            losses = curve.losses()
            rows.append([name, curve.size, *(f"{losses[max(1, round(s * curve.size))]:.2g}" for s in shares)])
        head = ["group", "units", *(f"loss with {s:.0%} kept" for s in shares)]
        return html_table(repr(self), head, rows)

    def loss_of(self, value: float) -> float:
        """Minus the value is a sum of powers of losses.

        Example:
            >>> round(ValueCurves({}).loss_of(-(0.2**POWER)), 2)
            0.2
        """
        return max(-value, 0.0) ** (1 / self.power)

    def joint_loss(self, losses: Iterable[float]) -> float:
        """What groups lose together that would lose so much one by one.

        Example:
            >>> round(ValueCurves({}).joint_loss([0.1, 0.1]), 3)     # more than their sum
            0.317
        """
        return float(sum(loss**TOGETHER for loss in losses) ** (1 / TOGETHER))

    @property
    def about(self) -> Mapping[str, Any]:
        return {"criterion": "curves", "data": self.data, "samples": self.samples, "power": self.power}

    def checked(self, groups: ChannelGroups) -> "ValueCurves":
        """Itself, or an error if it belongs to other groups."""
        missing = [group.name for group in groups if group.name not in self]
        unknown = sorted(set(self) - set(groups.by_name))
        if missing or unknown:
            what = f"no curve for {missing[0]!r}" if missing else f"a curve for {unknown[0]!r}, which is no group"
            raise ScoreError(f"these value curves belong to other groups: {what}; measure them again with value_curves")
        for group in groups:
            if self[group.name].size != group.size:
                turned = " or, where heads were turned before, give the images (turn_heads)"
                raise ScoreError(
                    f"the curve of {group.name!r} has {self[group.name].size} units, the group {group.size}; "
                    f"measure the curves again with value_curves{turned if group.name.endswith('.qkv') else ''}"
                )
        return self

    def ladder(self, group: ChannelGroup) -> Ladder:
        """The value of n units is minus a power of what is lost with them, made concave, as the solver needs it."""
        curve = self[group.name]
        return Ladder(np.arange(1, group.size + 1), -curve.hull(self.power)[1:], curve.order[::-1].copy())

    def save(self, path: str | os.PathLike) -> None:
        """Write to safetensors; the file appears whole or not at all."""
        tensors, notes = {}, {}
        for name, curve in self.items():
            for part in ("order", "error", "counts", "loss"):
                tensors[f"{name}/{part}"] = torch.from_numpy(np.ascontiguousarray(getattr(curve, part)))
            if curve.note:
                notes[name] = curve.note
        about = {"model": self.model, "data": self.data, "samples": self.samples}
        metadata = {"format": FORMAT, "about": json.dumps(about, sort_keys=True), "notes": json.dumps(notes)}
        write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike, groups: ChannelGroups | None = None) -> "ValueCurves":
        """Read a file; with ``groups``, refuse curves that belong to other groups."""
        parts, metadata = read_values(path, "value curves", FORMAT)
        notes, about = metadata.get("notes", {}), metadata.get("about", {})
        try:
            parts = {key: tensor.numpy() for key, tensor in parts.items()}
            names = dict.fromkeys(key.rpartition("/")[0] for key in parts)
            curves = {
                name: _checked_curve(name, *(parts[f"{name}/{p}"] for p in ("order", "error", "counts", "loss")))
                for name in names
            }
            curves = {name: GroupCurve(*curve, note=str(notes.get(name, ""))) for name, curve in curves.items()}
            loaded = cls(curves, **{key: about[key] for key in ("model", "data", "samples")})
        except ScoreError as error:
            raise ScoreError(f"{path}: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ScoreError(f"{path}: can't be read as value curves: {first_line(error)}") from None
        if groups is not None:
            try:
                loaded.checked(groups)
            except ScoreError as error:
                raise ScoreError(f"{path} (measured on {loaded.model or 'an unnamed model'}): {error}") from None
        return loaded


def _checked_curve(name: str, order, error, counts, loss) -> tuple[np.ndarray, ...]:
    size = len(order) if order.ndim else 0
    wrong = (
        order.ndim != 1 or order.dtype.kind != "i" or counts.dtype.kind != "i",
        error.dtype.kind != "f" or loss.dtype.kind != "f",
        size == 0 or sorted(order.tolist()) != list(range(size)),
        error.shape != (size + 1,) or not np.isfinite(error).all() or (np.diff(error) > 0).any(),
        counts.ndim != 1 or len(counts) == 0 or counts.min() < 1 or counts.max() >= max(size, 2),
        counts.shape != loss.shape or (np.diff(counts) <= 0).any(),
        not np.isfinite(loss).all() or (loss < 0).any(),
    )
    if any(wrong):
        what = f"the curve of {shortened(name)} makes no sense"
        raise ScoreError(f"{what} (order, error, counts or loss); measure it again")
    return order, error, counts, loss
