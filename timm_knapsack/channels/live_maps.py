"""Which maps are alive at which op of a forward pass: the ledger behind the ``activations`` cost.

A **map** is a tensor that depends on the input image, and the image itself; parameters, and what is computed from them
alone, are not. It lives from the op that makes it to the last op that reads it; the model's outputs live to the end. A
result that nothing reads (the indices of a max-pool) is not counted.

Tensors that share memory are one map: views, and the results of in-place ops. So are copies that only change how a map
lies in memory (``clone``, ``contiguous``): whether a reshape copies depends on strides, and a runtime is free to avoid
it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# Copies of one map in another place; a change of dtype is a new map.
COPIES = frozenset(
    "clone contiguous _to_copy _unsafe_view _reshape_copy view_copy expand_copy permute_copy lift_fresh_copy "
    "split_copy split_with_sizes_copy".split()
)


class LiveMaps:
    """Follows a pass op by op, whatever runs it.

    Args:
        describe: called once with the first tensor of each piece of memory; its result is kept with the map.
        hold: keep every tensor, so that ids stay theirs; for tensors on the meta device, which cost nothing.

    Example:
        >>> import torch
        >>> image = torch.zeros(3, 4)
        >>> maps = LiveMaps(lambda tensor: tuple(tensor.shape))
        >>> maps.start([image])
        >>> double = image * 2
        >>> maps.follow(torch.ops.aten.mul.Tensor, [image], [double])
        >>> turned = double.t()                   # shares memory
        >>> maps.follow(torch.ops.aten.t.default, [double], [turned])
        >>> result = turned.sum(1)
        >>> maps.follow(torch.ops.aten.sum.dim_IntList, [turned], [result])
        >>> maps.finish([result])
        >>> maps.lives()                          # (what was described, first op, last op)
        [((3, 4), 0, 1), ((3, 4), 1, 3), ((4,), 3, 3)]
    """

    def __init__(self, describe: Callable[[Tensor], Any], hold: bool = True):
        self._describe, self._hold = describe, hold
        self._time = 0
        self._memory: dict[int, int] = {}  # id of a tensor → number of its piece of memory
        self._held: dict[int, Any] = {}
        self._about: list[Any] = []
        self._first: list[int | None] = []  # op that made a map of it; None as long as it is none
        self._last: list[int | None] = []  # op that last read it

    def start(self, inputs: Sequence[Tensor]) -> None:
        """These are images."""
        for x in inputs:
            self._first[self._number(x)] = 0

    def follow(self, func, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """One op: ``inputs`` are all tensors among its arguments, ``outputs`` all among its results."""
        self._time += 1
        read = [self._number(x) for x in inputs]
        from_maps = False
        for number in read:
            if self._first[number] is not None:
                self._last[number] = self._time
                from_maps = True
        shared = self._shared_memory(func, inputs, outputs)
        for y in outputs:
            if id(y) not in self._memory:
                self._remember(y, shared)
            number = self._memory[id(y)]
            if from_maps and self._first[number] is None:
                self._first[number] = self._time

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """These are what the model returns."""
        for y in outputs:
            self._last[self._number(y)] = self._time

    def lives(self) -> list[tuple[Any, int, int]]:
        """(what was described, first op, last op) of every map that is read or returned."""
        rows = zip(self._about, self._first, self._last, strict=True)
        return [(about, first, last) for about, first, last in rows if first is not None and last is not None]

    def _shared_memory(self, func, inputs, outputs) -> int | None:
        """The piece of memory that the results share with the first argument, if they do."""
        if not inputs:
            return None
        name, number = func._schema.name.partition("::")[2], self._memory[id(inputs[0])]
        if any(result.alias_info is not None for result in func._schema.returns):
            return number
        if name in COPIES and self._first[number] is not None and outputs[0].dtype == inputs[0].dtype:
            return number
        return None

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._memory:
            self._remember(tensor, None)
        return self._memory[id(tensor)]

    def _remember(self, tensor: Tensor, shared: int | None) -> None:
        key = id(tensor)
        if shared is None:
            shared = len(self._about)
            self._about.append(self._describe(tensor))
            self._first.append(None)
            self._last.append(None)
        self._memory[key] = shared
        self._held[key] = tensor if self._hold else weakref.ref(tensor, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._memory.pop(key, None)
        self._held.pop(key, None)
