"""One segment of the student on its way: finished layers return what they have returned before."""

import itertools
from typing import Any

from torch import Tensor

from ..maps.stand_ins import standing_in
from ..maps.taps import Tap
from ..maps.walk import Reached, Walk, hooked, kept_bytes


class FinishedLayers:
    """Runs the current segment of a walk; an added layer returns its earlier output for a batch, if there is room.

    So fitting the layers of a segment one after another runs each of them once.
    """

    def __init__(self, walk: Walk):
        self.walk = walk
        self.outputs: dict[str, dict[tuple[int, int], Tensor]] = {}  # by batch and call
        self.written: set[str] = set()
        self.room = kept_bytes()

    def add(self, name: str, is_written: bool) -> None:
        self.outputs[name] = {}
        if is_written:
            self.written.add(name)

    def _stand_ins(self, batch: int) -> dict:
        def played(name):
            forward = self.walk.modules[name].forward
            known = self.outputs[name]
            calls = itertools.count()  # a shared layer runs several times and returns something else each time

            def run(*args, **kwargs):
                turn = batch, next(calls)
                if turn in known:
                    return known[turn].clone() if name in self.written else known[turn]
                output = forward(*args, **kwargs)
                size = output.numel() * output.element_size()
                if size < self.room and batch != self.walk.probe:
                    self.room -= size
                    known[turn] = output.clone() if name in self.written else output
                return output

            return run

        return {self.walk.modules[name]: played(name) for name in self.outputs}

    def run(self, batch: int) -> Any:
        """The segment's output."""
        with standing_in(self._stand_ins(batch)):
            return self.walk.run(batch)

    def input_of(self, name: str, batch: int) -> Tensor:
        """The input of the next layer."""
        seen = []

        def stop(x):
            seen.append(x)
            raise Reached

        with hooked((self.walk.modules[name], "input", stop)):
            self.run(batch)
        return seen[0]

    def input_and_sum(self, name: str, batch: int, tap: Tap) -> tuple[Tensor, Tensor]:
        """The input of the layer that ends the block, and the block's sum without what that layer adds."""
        layer = self.walk.modules[name]
        shapes = self._output_shape(name)
        seen = []

        def nothing(x, *args):
            seen.append(x.clone())
            return x.new_zeros(len(x), *shapes)

        def stop(x):
            seen.append(x.clone())
            raise Reached

        with standing_in({layer: nothing}), hooked((self.walk.modules[tap.module], tap.side, stop)):
            self.run(batch)
        return seen[0], seen[1]

    def _output_shape(self, name: str) -> tuple[int, ...]:
        seen = []

        def stop(y):
            seen.append(tuple(y.shape[1:]))
            raise Reached

        with hooked((self.walk.modules[name], "output", stop)):
            self.walk.run(self.walk.probe)
        return seen[0]
