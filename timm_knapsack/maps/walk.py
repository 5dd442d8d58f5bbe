"""Walking a network segment by segment with all of its images at hand: a run costs one segment, not the network.

A **segment** is a block (a residual block of ResNet-50, say), or a conv or linear outside of blocks. While the walk
stands at a segment, that segment's inputs are kept for every batch, so that it can be run any number of times, with
other weights, without running what lies before it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from .precision import depthwise, fast_passes
from .stand_ins import sliced_points, standing_in
from .taps import find_blocks, the_map

PROBE_IMAGES = 2  # for questions whose answer does not depend on how many images there are


class Reached(Exception):
    """Ends a forward pass once what was wanted has been seen."""


@dataclass(frozen=True)
class Execution:
    """What one forward pass tells about the convs and linears of a network.

    Attributes:
        order: their names, in the order in which they run.
        norm_after: ``{layer: the BatchNorm that its output goes to}``.
        calls: how often each runs.
    """

    order: tuple[str, ...]
    norm_after: Mapping[str, str]
    calls: Mapping[str, int]


@dataclass(frozen=True)
class Segment:
    """A block, or a layer outside of blocks, with its convs and linears in the order in which they run."""

    name: str
    layers: tuple[str, ...]


def watch_execution(model: nn.Module, images: Tensor) -> Execution:
    """Run a model once and note the order of its layers.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()
        >>> watch_execution(net, torch.zeros(1, 3, 2, 2))
        Execution(order=('0', '2'), norm_after={'0': '1'}, calls={'0': 1, '2': 1})
    """
    calls: dict[str, int] = {}
    made_by: dict[int, str] = {}
    norm_after: dict[str, str] = {}
    held, handles = [], []  # outputs are held so that their ids stay unique

    def ran(name):
        def hook(module, args, output):
            calls[name] = calls.get(name, 0) + 1
            made_by[id(output)] = name
            held.append(output)

        return hook

    def normed(name):
        def hook(module, args):
            if id(args[0]) in made_by:
                norm_after[made_by[id(args[0])]] = name

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            handles.append(module.register_forward_hook(ran(name)))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            handles.append(module.register_forward_pre_hook(normed(name)))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return Execution(tuple(calls), norm_after, calls)


def find_segments(model: nn.Module, order: Sequence[str]) -> list[Segment]:
    """Blocks, and the layers outside of blocks, in the order in which they run.

    Example:
        >>> import timm_knapsack, timm
        >>> model = timm.create_model("resnet10t").eval()
        >>> [segment.name for segment in find_segments(model, watch_execution(model, torch.zeros(1, 3, 64, 64)).order)]
        ['conv1.0', 'conv1.3', 'conv1.6', 'layer1.0', 'layer2.0', 'layer3.0', 'layer4.0', 'fc']
    """
    blocks = sorted(find_blocks(model), key=len, reverse=True)
    segments: dict[str, list[str]] = {}
    for name in order:
        block = next((b for b in blocks if name.startswith(b + ".")), name)
        segments.setdefault(block, []).append(name)
    return [Segment(name, tuple(layers)) for name, layers in segments.items()]


@contextmanager
def hooked(*hooks: tuple[nn.Module, str, Callable]) -> Iterator[None]:
    """Hooks ``(module, "input" or "output", function(tensor))`` for a while; a function may raise `Reached`.

    What a function computes keeps its precision, also in a pass that runs in bfloat16.
    """
    handles = []

    def exactly(function: Callable, x: Any) -> Any:
        device = x.device.type if isinstance(x, Tensor) else "cpu"
        with torch.autocast(device, enabled=False):
            return function(x)

    for module, side, function in hooks:
        if side == "input":
            handle = module.register_forward_pre_hook(
                lambda _, args, kwargs, f=function: exactly(f, args[0] if args else next(iter(kwargs.values()))),
                with_kwargs=True,
            )
        else:
            handle = module.register_forward_hook(lambda _, args, output, f=function: exactly(f, the_map(output)))
        handles.append(handle)
    try:
        yield
    except Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()


def kept_bytes() -> int:
    """What the kept inputs of one network may take: a sixth of the machine's memory; there may be two, and copies."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        memory = 8 * 2**30
    return memory // 6


class Walk:
    """A network on its way through its segments, with the inputs of the current one for every batch.

    Segments before the current one return placeholders for a single image, so that what lies between them costs next
    to nothing. A network that looks back farther than one segment (dense connections) or remembers the size of its
    batch would go wrong: after each step the output of such a run is compared with that of a plain run on two
    images, and where they differ everything is run from the images from then on (``sequential`` is False).

    Args:
        batches: the images, batch by batch, on the model's device.
        limit: bytes that the kept inputs may take; where a segment's inputs take more, those of an earlier segment
            are kept and what lies between is run again.
        probe: two images for questions about the network, the first by default; the same on each of several processes.
        fast: run in bfloat16 where that is faster; the probe, which questions are answered by, always runs as it is.
        steady: the weights do not change on the way, so that a plain run on the probe is made once.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
        >>> walk = Walk(net, [torch.ones(5, 3, 2, 2)], [Segment("0", ("0",)), Segment("2", ("2",))])
        >>> walk.advance()
        >>> walk.segment.name, tuple(walk.run(0).shape)
        ('2', (5, 2, 2, 2))
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        segments: Sequence[Segment],
        limit: int | None = None,
        probe: Tensor | None = None,
        fast: bool = False,
        steady: bool = False,
    ):
        self.model, self.segments = model, list(segments)
        self._steady, self._plain = steady, None
        self.modules = dict(model.named_modules())
        self.probe = len(batches)  # number of a last, small batch
        self.batches = [*batches, batches[0][:PROBE_IMAGES] if probe is None else probe]
        self.position = 0
        self.sequential = True
        self._fast = fast
        self._limit = kept_bytes() if limit is None else limit
        self._images = sum(len(batch) for batch in batches)
        self._base = 0  # the segment whose inputs are kept
        self._thin = (
            len(self.batches[-1]) > 1
        )  # placeholders for one image; a batch of one can't show whether that works
        self._shapes: dict[str, Any] = {}
        self._writes = False  # does the segment at the base write into its inputs?
        self._inputs: list[Any] = [self._capture(number) for number in range(len(self.batches))]
        self._look_for_writes()

    @property
    def segment(self) -> Segment:
        return self.segments[self.position]

    @property
    def module(self) -> nn.Module:
        return self.modules[self.segment.name]

    def run(self, batch: int, gradients: bool = False) -> Any:
        """The current segment's output for a batch; hooks and stand-ins inside the segment take effect."""
        args, kwargs = self._fresh(batch) if self._base == self.position else self._capture(batch)
        safe = sliced_points(self.module) if gradients else {}
        fast = not (gradients and self.batches[batch].device.type == "cpu" and depthwise(self.module))
        with torch.set_grad_enabled(gradients), self._passes(batch, fast), standing_in(safe):
            return self.module(*args, **kwargs)

    def rest(self, batch: int, model: nn.Module | None = None) -> Any:
        """The output of the whole network for a batch, from the current segment on.

        Args:
            model: another network with the same modules (a slim one, say), equal to this one before the segment.
        """
        model = self.model if model is None else model
        modules = self.modules if model is self.model else dict(model.named_modules())
        if not self.sequential or not self._base:
            with torch.no_grad(), self._passes(batch):
                return model(self.batches[batch])
        with torch.no_grad(), self._passes(batch), standing_in(self._stand_ins(batch, modules)):
            return model(self._few(batch))

    def advance(self, outputs: list[Any] | None = None) -> None:
        """On to the next segment.

        Args:
            outputs: what this segment returns for each batch, where that is known; the list is emptied on the way.
        """
        name = self.segment.name
        if outputs is None:
            outputs = [self.run(number) for number in range(self.probe)]
        outputs.append(self.run(self.probe))
        if not self.sequential:
            self.position += 1
            self._base = self.position
            self._inputs = [self._capture(number) for number in range(len(self.batches))]
            return
        self._shapes[name] = tree_map(_shape_of, outputs[-1])
        earlier = self._base, self._inputs
        self.position += 1
        if not self._works(outputs[-1]):
            outputs.clear()
            self.sequential = False
            self._base = self.position
            self._inputs = [self._capture(number) for number in range(len(self.batches))]
            self._look_for_writes()
            return
        probe = self._handed_over(self.probe, _copied(outputs[-1]))  # in-place ops may follow, and it is needed again
        if _bytes_of(probe) / len(self.batches[-1]) * self._images > self._limit:
            self._base, self._inputs = earlier
            outputs.clear()
            return
        self._inputs = []
        for number in range(len(self.batches)):
            self._inputs.append(self._handed_over(number, outputs[number]))
            outputs[number] = None
        outputs.clear()
        self._base = self.position
        self._look_for_writes()

    # ---- how it is done

    def _passes(self, batch: int, fast: bool = True) -> AbstractContextManager:
        return fast_passes(self.batches[batch].device, fast and self._fast and batch != self.probe)

    def _few(self, batch: int) -> Tensor:
        images = self.batches[batch]
        return images[:1] if self._thin and self._base else images

    def _stand_ins(self, batch: int, modules: Mapping[str, nn.Module]) -> dict[nn.Module, Callable]:
        """Placeholders before the base; the base runs on its kept inputs."""
        count = len(self._few(batch))
        result = {modules[s.name]: _returns_zeros(self._shapes[s.name], count) for s in self.segments[: self._base]}
        base = modules[self.segments[self._base].name]
        forward, (args, kwargs) = base.forward, self._fresh(batch)
        result[base] = lambda *_, **__: forward(*args, **kwargs)
        return result

    def _handed_over(self, batch: int, output: Any) -> Any:
        """The inputs of the current segment, given what the one before it returned."""
        count = len(self.batches[batch][:1]) if self._thin else len(self.batches[batch])
        before = self.segments[: self.position]
        forwards = {self.modules[s.name]: _returns_zeros(self._shapes[s.name], count) for s in before}
        forwards[self.modules[before[-1].name]] = lambda *_, **__: output
        with self._passes(batch), standing_in(forwards):
            return self._entered(self.batches[batch][:count])

    def _capture(self, batch: int) -> Any:
        """The inputs of the current segment, from the kept ones of an earlier segment or from the images."""
        with self._passes(batch):
            if self.position == 0 or not self.sequential:
                return self._entered(self.batches[batch])
            with standing_in(self._stand_ins(batch, self.modules)):
                return self._entered(self._few(batch))

    def _entered(self, images: Tensor) -> Any:
        seen: list[Any] = []

        def stop(_, args, kwargs):
            seen.append((args, kwargs))
            raise Reached

        handle = self.module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                self.model(images)
        except Reached:
            pass
        finally:
            handle.remove()
        return seen[0]

    def _works(self, output: Any) -> bool:
        """Does a run with stand-ins give what a plain run gives, on the probe?"""
        if self._plain is None or not self._steady:
            with torch.no_grad():
                self._plain = self.model(self.batches[self.probe])
        plain = self._plain
        for thin in (True, False) if self._thin else (False,):
            self._thin = thin
            before = self.segments[: self.position]
            count = 1 if thin else len(self.batches[self.probe])
            forwards = {self.modules[s.name]: _returns_zeros(self._shapes[s.name], count) for s in before}
            forwards[self.modules[before[-1].name]] = lambda *_, **__: _copied(output)
            try:
                with torch.no_grad(), standing_in(forwards):
                    played = self.model(self.batches[self.probe][:count])
            except (RuntimeError, IndexError, ValueError, TypeError):  # shapes that do not fit
                continue
            if _all_close(plain, played) and self._rest_works(output, plain, count):
                return True
        return False

    def _rest_works(self, output: Any, plain: Any, count: int) -> bool:
        """The same with nothing but placeholders before the current segment: a shortcut around it would be lost."""
        args, kwargs = self._handed_over(self.probe, _copied(output))
        before = self.segments[: self.position]
        forwards = {self.modules[s.name]: _returns_zeros(self._shapes[s.name], count) for s in before}
        forward = self.module.forward
        forwards[self.module] = lambda *_, **__: forward(*args, **kwargs)
        try:
            with torch.no_grad(), standing_in(forwards):
                return _all_close(plain, self.model(self.batches[self.probe][:count]))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False

    def _look_for_writes(self) -> None:
        """Does the segment write into its inputs (in-place ops)? Then each run gets a copy. Found out on the probe."""
        self._writes = True
        args, kwargs = self._fresh(self.probe)
        versions = [t._version for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        with torch.no_grad():
            self.module(*args, **kwargs)
        after = [t._version for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        self._writes = versions != after

    def _fresh(self, batch: int) -> Any:
        return _copied(self._inputs[batch]) if self._writes else self._inputs[batch]


def _all_close(a: Any, b: Any) -> bool:
    pairs = zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True)
    return all(_close(x, y) for x, y in pairs if isinstance(x, Tensor))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(a.abs().max())))


def _copied(x: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)


def _bytes_of(x: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_flatten(x)[0] if isinstance(t, Tensor))


@dataclass(frozen=True)
class _Shape:
    """Of one image's share of an output."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _shape_of(x: Any) -> Any:
    return _Shape(tuple(x.shape[1:]), x.dtype, x.device) if isinstance(x, Tensor) else x


def _returns_zeros(shapes: Any, count: int) -> Callable:
    def zeros(shape):
        if not isinstance(shape, _Shape):
            return shape
        return torch.zeros(count, *shape.size, dtype=shape.dtype, device=shape.device)  # new: in-place ops may follow

    return lambda *_, **__: tree_map(zeros, shapes)
