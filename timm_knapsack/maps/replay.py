"""Run a network from the middle: what earlier segments returned is kept and played back, not computed again.

Layer-by-layer recovery runs the same images through the network once for each layer. With the output of the last
finished segment kept for every batch, such a run costs one segment instead of the whole network.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map


def _cache_bytes() -> int:
    """What one network's kept outputs may take: an eighth of the machine, since there is a teacher too, and copies."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        memory = 8 * 2**30
    return min(memory // 8, 10 * 2**30)


MAX_CACHE_BYTES = _cache_bytes()


class _Reached(Exception):
    """Ends a forward pass once what was wanted has been seen."""


class Replay:
    """A network that can be run up to a module, from the last finished segment on.

    Earlier segments return placeholders for a single image, so that what lies between them costs next to nothing; for
    all images where the network remembers how many it was given. Where it looks back farther than one segment (dense
    connections), placeholders would be wrong: `finish` compares with a full run on two images, and plays nothing back
    from then on.
    """

    def __init__(self, model: nn.Module, batches: list[Tensor]):
        self.model, self.batches = model, batches
        self.cached: list[Any] | None = None
        self.finished: list[nn.Module] = []
        self.too_large: list[nn.Module] = []  # finished too, since the last one that was kept
        self.reproduces = True  # playing back gives what the whole network gives
        self.thin = len(batches[0]) > 1  # placeholders for a single image; a batch of one can't show whether that holds
        self._shapes: dict[nn.Module, Any] = {}

    def run(self, batch: int, until: nn.Module, side: str = "output", wanted=None) -> dict[str, Any]:
        """Run a batch until a module has been reached; returns the wanted inputs and outputs by name."""
        seen: dict[str, Any] = {}
        handles = []

        def listen(name, module, side, stop):
            def before(_, args, kwargs):
                seen[name] = _copied(args[0] if args else next(iter(kwargs.values())))
                if stop:
                    raise _Reached

            def after(_, args, output):
                seen[name] = _copied(output)
                if stop:
                    raise _Reached

            if side == "input":
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(after))

        for name, (module, where) in (wanted or {}).items():
            listen(name, module, where, False)
        listen("until", until, side, True)
        try:
            with torch.no_grad(), self._played_back(batch) as images:
                self.model(images)
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def first(self, images: int) -> "Replay":
        """The same for the first few images: for questions whose answer does not depend on how many there are."""
        few = Replay(self.model, [self.batches[0][:images]])
        if self.cached is not None:
            few.cached = [tree_map(lambda x: x[:images] if isinstance(x, Tensor) else x, self.cached[0])]
        few.finished, few.reproduces, few.thin, few._shapes = self.finished, self.reproduces, self.thin, self._shapes
        return few

    @contextmanager
    def _played_back(self, batch: int):
        images = self.batches[batch]
        if self.cached is None:
            yield images
            return
        if self.thin:
            images = images[:1]
        for module in self.finished:
            if module is self.finished[-1]:
                module.forward = _returns(_copied(self.cached[batch]))
            else:
                module.forward = _returns(_placeholder(self._shapes[module], len(images)))
        try:
            yield images
        finally:
            for module in self.finished:
                del module.forward

    def finish(self, segment: nn.Module) -> None:
        """Keep the segment's outputs; later runs start behind it. If they are too large, behind the one before."""
        if not self.reproduces:
            return
        outputs = []
        for batch, images in enumerate(self.batches):
            output = self.run(batch, segment)["until"]
            if not outputs:
                self._shapes[segment] = tree_map(_shape_of, output)
                share = sum(x.numel() * x.element_size() for x in tree_flatten(output)[0] if isinstance(x, Tensor))
                if share / len(images) * sum(map(len, self.batches)) > MAX_CACHE_BYTES:
                    self.too_large.append(segment)
                    return
            outputs.append(output)
        self.cached = outputs
        self.finished += [*self.too_large, segment]
        self.too_large = []
        if self._same_as_full():
            return
        if self.thin:
            self.thin = False
            if self._same_as_full():
                return
        self.reproduces, self.cached, self.finished = False, None, []

    def _same_as_full(self) -> bool:
        """Does playing back change what the network returns, on two images?"""
        probe = self.first(2)
        with torch.no_grad():
            full = self.model(probe.batches[0])
            try:
                with probe._played_back(0) as images:
                    played = self.model(images)
            except (RuntimeError, IndexError, ValueError):  # shapes that do not fit
                return False
        pairs = zip(tree_flatten(full)[0], tree_flatten(played)[0], strict=True)
        return all(_close(a, b) for a, b in pairs if isinstance(a, Tensor))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(a.abs().max())))


def _copied(x: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)  # in-place ops come after


def _returns(value: Any) -> Callable:
    return lambda *args, **kwargs: value


@dataclass(frozen=True)
class _Shape:
    """Of one image's share of an output."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _shape_of(x: Any) -> Any:
    return _Shape(tuple(x.shape[1:]), x.dtype, x.device) if isinstance(x, Tensor) else x


def _placeholder(shapes: Any, batch: int) -> Any:
    def zeros(shape):
        if not isinstance(shape, _Shape):
            return shape
        return torch.zeros(batch, *shape.size, dtype=shape.dtype, device=shape.device)  # in-place ops may follow

    return tree_map(zeros, shapes)
