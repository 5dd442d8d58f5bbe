"""A network less some of its residual branches, ready to be cut to widths, and what it costs beside the original."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..channels.find_groups import find_channel_groups
from ..channels.verification import without_groups
from ..costs.cost import Cost
from ..costs.kinds import COSTS
from ..costs.registry import CostKind
from ..errors import KnapsackError
from ..maps.branches import Branch, removed_by
from ..slim.channel_config import ChannelConfig
from ..slim.channel_groups import ChannelGroups
from ..slim.example_inputs import example_dtype
from ..slim.removed_blocks import without_modules
from .budget import Budget


@dataclass(frozen=True)
class Shorter:
    """A network without some of its blocks; with none of them gone, the network itself.

    Attributes:
        original: the network with all of its blocks: what budgets are parts of.
        original_groups: its channel groups.
        model: the network without them; it shares the original's weights.
        groups: its channel groups.
        left: for each of these, the number of the original's group that has the same units.
        blocks: names of the branches that are gone.
        removed: ``{module: "identity" or "zero"}``.
    """

    original: nn.Module
    original_groups: ChannelGroups
    model: nn.Module
    groups: ChannelGroups
    left: tuple[int, ...]
    blocks: tuple[str, ...] = ()
    removed: Mapping[str, str] = field(default_factory=dict)
    _counted: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_whole(cls, model: nn.Module, groups: ChannelGroups) -> "Shorter":
        return cls(model, groups, model, groups, tuple(range(len(groups))))

    def values_of(self, values):
        """Values of the original's groups, by the names of this network's."""
        names = [group.name for group in self.original_groups]
        return {group.name: values[names[number]] for group, number in zip(self.groups, self.left, strict=True)}

    def costs(self, budget: Budget) -> tuple[list[Cost], dict[str, float]]:
        """The costs of this network as functions of its widths, and what the original costs."""
        costs, whole = [], {}
        for name in budget.asked:
            table = budget.table_of(name)
            cost = COSTS[name].cost(self.original, self.original_groups, table)
            sizes = self.original_groups.sizes
            whole[name] = cost.at(sizes)
            if self.removed:
                shorter = cost.shortened(self.removed, self.left, sizes)
                cost = COSTS[name].cost(self.model, self.groups, table) if shorter is None else shorter
            costs.append(cost)
        return costs, whole

    def counted_original(self, kind: CostKind) -> float:
        """What the original costs by count, counted once for all budgets."""
        if kind.name not in self._counted:
            self._counted[kind.name] = kind.count(self.original, tuple(self.original_groups.input_shape[1:]))
        return self._counted[kind.name]

    def recorded(self, config: ChannelConfig) -> ChannelConfig:
        """The config of a network that was cut out of this one, with what is gone besides."""
        if not self.removed:
            return config
        now = ChannelConfig(config.base, {}, removed=self.removed)
        tables = {key: getattr(config, key) for key in ("widths", "attributes", "kept", "removed")}  # of an earlier cut
        left = {key: {n: v for n, v in table.items() if not now.lacks(n)} for key, table in tables.items()}
        return replace(config, **{**left, "removed": {**left["removed"], **self.removed}})


def shorten(
    model: nn.Module, groups: ChannelGroups, branches: Sequence[Branch], among: Sequence[Branch], verify: str = "auto"
) -> Shorter:
    """The network without these branches, and its channel groups, whose units are those of the original's.

    Args:
        groups: of the model.
        among: all branches that `find_branches` found.
        verify: how its groups are tried, as in `find_channel_groups`.

    Raises:
        KnapsackError: where channels hang together in another way without the branches.

    Example:
        >>> from timm_knapsack.maps.branches import find_branches
        >>> net = timm.create_model("resnet18")
        >>> branches, _ = find_branches(net, torch.randn(1, 3, 64, 64))
        >>> shorter = shorten(net, find_channel_groups(net), branches[:2], branches)
        >>> shorter.blocks, shorter.model.layer1
        (('layer1.0', 'layer1.1'), Sequential(
          (0): Identity()
          (1): Identity()
        ))
    """
    if not branches:
        return Shorter.of_whole(model, groups)
    removed = removed_by(branches, among)
    shorter = without_modules(model, removed)
    example = torch.empty(groups.input_shape, device="meta", dtype=example_dtype(model))
    found = find_channel_groups(shorter, example, verify=verify)
    found = without_groups(found, _frozen_before(groups, found))
    left = _matched(groups, found)
    return Shorter(model, groups, shorter, found, left, tuple(branch.name for branch in branches), removed)


def _frozen_before(groups: ChannelGroups, found: ChannelGroups) -> dict[int, str]:
    """``{number of a group: why it stays}`` for those that are frozen in the original, since a trial of them failed."""
    owned = {(s.param, s.dim) for group in groups for s in group.slices}
    free = [any((s.param, s.dim) in owned for s in group.slices if s.role) for group in found]
    why = "it can't be cut in the network with all of its blocks"
    return {i: groups.frozen.get(group.name, why) for i, group in enumerate(found) if not free[i]}


def _matched(groups: ChannelGroups, found: ChannelGroups) -> tuple[int, ...]:
    """For each group that was found, the number of the original's that owns the same slices, unit by unit."""
    owners: dict[tuple[str, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for number, group in enumerate(groups):
        for s in group.slices:
            owners[s.param, s.dim].append((number, s.index))
    result = []
    for group in found:
        places = [(owners[s.param, s.dim], s.index) for s in group.slices if s.role]
        numbers = [{n for n, index in owned if torch.equal(index, own)} for owned, own in places]
        same = set.intersection(*numbers)
        if len(same) != 1:
            raise KnapsackError(f"without these blocks the channels of {group.name} hang together in another way")
        result.append(same.pop())
    if len(set(result)) < len(result):
        raise KnapsackError("without these blocks a channel group falls apart")
    return tuple(result)
