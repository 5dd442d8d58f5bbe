"""Does a network without some units compute what the full one does with zeros in their place? By values.

Shapes that fit prove little: a cut at a literal place, a square shuffle, a number that is calculated from a width all
fit. Here slim and masked network run on the same random image, with random weights for which every channel matters,
in float64; their outputs must agree. Where a norm runs across the channels, the masked network's norm sees the
survivors only (`survivors`), so that such groups are no exception.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..errors import first_line
from ..slim.channel_groups import ChannelGroup, ChannelGroups
from ..slim.cutting import kept_indices, mask_model, slice_model
from .coupling import couple
from .live_weights import live_copy
from .survivors import CannotFollow, SurvivorsOnly
from .tracing import Assumptions, run_trace, run_under

# Relative. Rounding in float64 moves outputs by 1e-14; a mistake by percents, but a norm may hide most of one.
TOLERANCE = 1e-9

# Ways to draw units. Each group is drawn in each way, neighbours in different ones at a time: where two parts meet, an
# equal loss of both could hide that the place between them is calculated.
WAYS_TO_DRAW = ("some", "many", "few")

# Values are compared where that takes at most this share of scoring so many images, forward and backward. Both are
# counted in MACs in float32, so that the same network is always verified in the same way.
MOST_SHARE = 0.1
SCORED_IMAGES = 256
PASSES_TO_SCORE = 3  # a backward pass takes two

# What the check does where nothing is wrong: a masked and a slim pass for each draw, one to see if it takes two images,
# one to label its values. A MAC in float64 takes two in float32; a weight, which is drawn once and copied six times, a
# thousand (30 ns, measured on VGG-16 at 30 G MACs a second).
PASSES = 2 * len(WAYS_TO_DRAW) + 2
MACS_IN_FLOAT64 = 2
MACS_OF_A_WEIGHT = 1000

# Seconds, at most: compared whatever the share is. Small images have it large, since copies of weights don't shrink.
LITTLE_WORK = 1e11

# Above this its three copies in float64 take more than 5 GB.
MOST_PARAMETERS = 200e6

# Below this two images are compared instead of one.
CHEAP_MACS = 1e9


class NoValues(Exception):
    """The network's values can't be compared, with the reason."""


def too_dear(groups: ChannelGroups) -> str:
    """Why a network's values are not compared unless one asks for it; empty where they are."""
    if (count := _parameters(groups)) > MOST_PARAMETERS:
        return f"{count:.3g} parameters, more than {MOST_PARAMETERS:.3g}"
    work, scoring = work_of_check(groups), SCORED_IMAGES * PASSES_TO_SCORE * groups.macs()
    if work > max(LITTLE_WORK, MOST_SHARE * scoring):
        share = f"{work / scoring:.0%}" if scoring else "more than all"
        return f"it would take {share} of scoring {SCORED_IMAGES} images, more than {MOST_SHARE:.0%}"
    return ""


def work_of_check(groups: ChannelGroups) -> float:
    """What comparing values takes where nothing is wrong, in MACs in float32."""
    images = 2 if groups.macs() <= CHEAP_MACS else 1
    return PASSES * images * MACS_IN_FLOAT64 * groups.macs() + MACS_OF_A_WEIGHT * _parameters(groups)


def _parameters(groups: ChannelGroups) -> int:
    return sum(torch.Size(shape).numel() for shape in groups.shapes.values())


class ValueCheck:
    """Compares slim and masked networks of one model.

    Args:
        model: it may be on the meta device; neither it nor its weights are used.
        assuming: what the trace that found the groups assumed.
    """

    draws = range(len(WAYS_TO_DRAW))
    words = "without some of its channels the network computes something else"

    def __init__(self, groups: ChannelGroups, model: nn.Module, inputs: tuple, assuming: Assumptions):
        self.groups, self.assuming = groups, assuming
        self.most_runs = int(min(60, max(10, 200e9 / max(1, groups.macs()))))
        owned = frozenset(s.param for group in groups for s in (*group.slices, *group.hidden_slices))
        self.live = live_copy(model, owned, torch.float64)
        self._labels: tuple[dict, np.ndarray] | None = None
        self.exempt: dict[int, str] = {}  # groups whose values can't be compared, with why
        self.inputs = _random_inputs(inputs, 1)
        if groups.macs() <= CHEAP_MACS:  # code may take a batch of one for something else
            pair = _random_inputs(inputs, 2)
            with suppress(Exception):  # whatever it raises: it takes single images, then
                _run(self.live, pair)
                self.inputs = pair

    def failure(self, chosen: Sequence[int], draw: int) -> Exception | None:
        """What differs when some units of the chosen groups are removed; None where nothing does."""
        while True:
            keep = {self.groups[i].name: self.units(i, draw) for i in chosen if i not in self.exempt}
            if not keep:
                return None
            try:
                expected = self._expected(keep)
                break
            except CannotFollow as error:
                self._exempt(error)
            except Exception as error:
                raise NoValues(f"it does not run with random weights in float64: {first_line(error)}") from error
        _must_tell(expected)
        try:
            outputs = _run(slice_model(self.live, self.groups, keep), self.inputs)
        except Exception as error:  # whatever a foreign model raises: the group is left alone and the reason said
            return error
        difference = _difference(outputs, expected)
        if difference <= TOLERANCE or difference <= self._rounding():
            return None
        if _difference(_run(self.live, self.inputs, seed=1), _run(self.live, self.inputs, seed=2)) > 0:
            raise NoValues("its outputs are random")
        return ValueError(f"outputs differ by {100 * difference:.2g} % from those with zeros in their place")

    def units(self, i: int, draw: int) -> Sequence[int]:
        """The units of a group that stay in this draw."""
        return drawn_units(self.groups[i], WAYS_TO_DRAW[(draw + i) % len(WAYS_TO_DRAW)])

    def _rounding(self) -> float:
        """How far rounding may move the outputs: more than that of float64, where code asks for another dtype."""
        with _LowestPrecision() as seen:
            _run(self.live, self.inputs)
        if seen.eps > 1e-5:
            raise NoValues(f"parts of it are computed with a precision of {seen.eps:.0e}")
        return 100 * seen.eps

    def _expected(self, keep) -> list[Tensor]:
        masked = mask_model(self.live, self.groups, keep)
        if not any(self.groups[name].crosses_norm for name in keep):
            return _run(masked, self.inputs)
        return run_under(SurvivorsOnly(masked, self.assuming, self._alive(keep)), masked, self.inputs).outputs

    def _alive(self, keep) -> np.ndarray:
        """For each label of a trace with values whether it stays."""
        if self._labels is None:  # real tensors may take other ops than those of the meta device, with other labels
            trace = run_trace(self.live, self.inputs, self.assuming, follow_maps=False)
            self._labels = trace.param_labels, couple(trace.labels).component
        first, component = self._labels
        gone = np.zeros(component.max() + 1, dtype=bool)
        for name, dims in kept_indices(self.groups, self.groups.check_keep(keep)).items():
            for dim, stays in dims.items():
                removed = np.setdiff1d(np.arange(self.groups.shapes[name][dim]), stays.numpy())
                gone[component[first[name, dim] + removed]] = True
        return ~gone[component]

    def _exempt(self, error: CannotFollow) -> None:
        first, component = self._labels
        concerned = set(component[error.labels].tolist())
        found = False
        for i, group in enumerate(self.groups):
            for s in (*group.slices, *group.hidden_slices):
                if i not in self.exempt and concerned & set(component[first[s.param, s.dim] + s.index.numpy()].flat):
                    self.exempt[i], found = str(error), True
        if not found:
            raise NoValues(str(error))


class ChoiceCheck(ValueCheck):
    """The same for one choice of units: code may do something else at just these widths."""

    draws = range(1)
    words = "at the width that was chosen the network computes something else"

    def __init__(self, groups: ChannelGroups, model: nn.Module, keep: Mapping[str, Tensor]):
        super().__init__(groups, model, *groups.basis)
        self.keep = groups.check_keep(keep)

    def units(self, i: int, draw: int) -> Sequence[int]:
        return self.keep[self.groups[i].name]


class _LowestPrecision(TorchDispatchMode):
    """Notes the coarsest dtype that an op gives."""

    eps = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for y in tree_flatten(result)[0]:
            if isinstance(y, Tensor) and y.is_floating_point():
                self.eps = max(self.eps, torch.finfo(y.dtype).eps)
        return result


def drawn_units(group: ChannelGroup, how: str) -> list[int]:
    """Units to keep: "some", without the first and the last; "many", the first among them; or "few".

    A cut at a literal place shows where a unit before it is gone; code that asks for a width's parity where some and
    many differ in it; code that asks for more than so many channels where many are there.
    """
    choose = random.Random(f"{how} {group.name}")
    size, least = group.size, min(2 if group.crosses_norm else 1, group.size - 1)
    inside = range(1, size - 1) if size - 2 >= least else range(1, size)
    middle = random.Random(group.name).randint(max(least, len(inside) // 3), max(least, len(inside) * 3 // 4))
    if how == "some":
        return sorted(choose.sample(inside, middle))
    if how == "many":
        count = size - 1 if (size - 1 - middle) % 2 or size == 3 else size - 2
        return [0, *sorted(choose.sample(range(1, size), count - 1))] if size > 2 else [0, 1]
    return sorted(choose.sample(range(size), choose.randint(least, max(least, size // 5))))


def _random_inputs(inputs: tuple, batch: int) -> tuple:
    """Random numbers in place of the inputs; ``batch`` images where they are one."""
    draw = torch.Generator().manual_seed(1)

    def drawn(x):
        if not isinstance(x, Tensor):
            return x
        times = batch if x.dim() and x.shape[0] == 1 else 1
        if x.is_floating_point():
            shape = (x.shape[0] * times, *x.shape[1:]) if x.dim() else ()
            return torch.randn(shape, generator=draw, dtype=torch.float64)
        x = torch.zeros_like(x, device="cpu") if x.is_meta else x.detach().cpu()
        return torch.cat([x] * times) if times > 1 else x

    return tuple(drawn(x) for x in inputs)


def _run(model: nn.Module, inputs: tuple, seed: int = 0) -> list[Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [y for y in tree_flatten(model(*inputs))[0] if isinstance(y, Tensor)]


def _must_tell(outputs: list[Tensor]) -> None:
    """Outputs that would agree with anything prove nothing."""
    numbers = [y for y in outputs if y.is_floating_point()]
    if not numbers or not all(torch.isfinite(y).all() for y in numbers):
        raise NoValues("its outputs are not finite numbers with random weights")
    if not any(y.abs().max() > 0 for y in numbers if y.numel()):
        raise NoValues("its outputs are zero with random weights")


def _difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of the same output."""
    if [y.shape for y in outputs] != [y.shape for y in expected]:
        return float("inf")
    worst = 0.0
    for got, right in zip(outputs, expected, strict=True):
        if not right.is_floating_point():
            worst = max(worst, float(not torch.equal(got, right)))
        elif right.numel():
            distance = (got - right).abs().max() / right.abs().max().clamp_min(1e-30)
            worst = max(worst, float(distance) if torch.isfinite(distance) else float("inf"))
    return worst
