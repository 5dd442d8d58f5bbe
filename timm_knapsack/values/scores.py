"""Scores: a number for every unit of every group, with where they come from, as a safetensors file."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ScoreError
from ..files.plain_json import shortened
from ..human_tables import html_table
from ..slim.channel_groups import ChannelGroup, ChannelGroups
from ..slim.tensor_files import write_tensors
from .group_values import GroupValues, Ladder
from .value_files import read_values

FORMAT = "timm-knapsack/scores"


class Scores(dict, GroupValues):
    """``{group name: float64 tensor [size]}`` with where they come from.

    Example:
        >>> scores = taylor_scores(model, groups, loader)
        >>> scores.save("scores.safetensors")
        >>> scores = Scores.load("scores.safetensors", groups)
    """

    def __init__(self, values: Mapping[str, Tensor], *, criterion="", model="", data="", samples: int = 0):
        super().__init__(values)
        self.criterion, self.model, self.data, self.samples = criterion, model, data, samples

    def __repr__(self):
        return f"Scores({len(self)} groups, {sum(map(len, self.values()))} units, {self.criterion or 'given'})"

    def _repr_html_(self) -> str:
        values = {name: torch.as_tensor(v).double() for name, v in self.items() if len(v)}
        rows = [[n, len(v), *(f"{x:.3g}" for x in (v.min(), v.median(), v.max()))] for n, v in values.items()]
        return html_table(repr(self), ["group", "units", "least", "median", "most"], rows)

    @property
    def about(self) -> Mapping[str, Any]:
        about = {"criterion": self.criterion, "data": self.data, "samples": self.samples}
        return about if any(about.values()) else {}

    def checked(self, groups: ChannelGroups) -> "Scores":
        """The same scores as float64 tensors, or an error if they do not belong to these groups."""
        return Scores(check_scores(self, groups), model=self.model, **self.about)

    def ladder(self, group: ChannelGroup) -> Ladder:
        """The best units first: n of them are worth the sum of the n largest scores."""
        values = self[group.name].numpy()
        order = np.argsort(-values, kind="stable")
        return Ladder(np.arange(len(values) + 1), np.concatenate([[0.0], np.cumsum(values[order])]), order)

    def save(self, path: str | os.PathLike) -> None:
        """Write to safetensors; the file appears whole or not at all."""
        about = {"criterion": self.criterion, "model": self.model, "data": self.data, "samples": self.samples}
        write_tensors(path, self, {"format": FORMAT, "about": json.dumps(about, sort_keys=True)})

    @classmethod
    def load(cls, path: str | os.PathLike, groups: ChannelGroups | None = None) -> "Scores":
        """Read a file; with ``groups``, refuse scores that belong to other groups."""
        tensors, metadata = read_values(path, "scores", FORMAT)
        for name, values in tensors.items():
            try:
                _check_values(name, values)
            except ScoreError as error:
                raise ScoreError(f"{path}: {error}") from None
        scores = cls(tensors, **metadata.get("about", {}))
        if groups is not None:
            try:
                check_scores(scores, groups)
            except ScoreError as error:
                raise ScoreError(f"{path} (scored on {scores.model or 'an unnamed model'}): {error}") from None
        return scores


def check_scores(scores: Mapping[str, Tensor], groups: ChannelGroups) -> dict[str, Tensor]:
    """The scores as float64 tensors, or an error if they do not belong to these groups."""
    missing = [group.name for group in groups if group.name not in scores]
    unknown = sorted(set(scores) - set(groups.by_name))
    if missing or unknown:
        what = f"no scores for the group {missing[0]!r}" if missing else f"scores for {unknown[0]!r}, which is no group"
        raise ScoreError(f"these scores belong to other groups: {what}; score this model again with taylor_scores")
    result = {}
    for group in groups:
        values = torch.as_tensor(scores[group.name]).detach().cpu()
        values = values if values.is_complex() else values.double()  # half of a complex number would be lost unseen
        if values.shape != (group.size,):
            raise ScoreError(
                f"scores[{group.name!r}] has shape {list(values.shape)}, the group has {group.size} units; "
                "score this model again with taylor_scores"
            )
        _check_values(group.name, values)
        result[group.name] = values
    return result


def _check_values(name: str, values: Tensor) -> None:
    """A unit with a negative value would be better removed than kept, and pruning would go on far below the budget."""
    if not values.is_floating_point() or values.ndim != 1:
        raise ScoreError(f"scores[{shortened(name)}] is {values.dtype} of shape {list(values.shape)}, not one per unit")
    if not torch.isfinite(values).all():
        raise ScoreError(f"scores[{shortened(name)}] has values that are not finite; is the loss finite on this data?")
    if (values < 0).any():
        raise ScoreError(
            f"scores[{shortened(name)}] has a negative value, {values.min().item():.6g}; a score says what a unit is "
            "worth, at least 0: take absolute values, or subtract the least score of all groups"
        )
