"""Values that a network's code makes of nothing: grids of positions, masks of ones. On the meta device they are known.

A model that asks ``if mask.any():`` can't run on the meta device, where tensors have shapes alone; with real tensors it
takes as long as any forward pass. But what is asked for is mostly made by ``torch.ones`` and ``torch.arange``, and not
of the image or the weights. So it is remembered how such tensors were made, and where a value is asked for, they are
made again on the CPU. What depends on an image, a weight or a random number has no known value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_MADE_OF_NOTHING = frozenset("arange ones zeros full scalar_tensor linspace eye".split())


class KnownValues:
    """Remembers how tensors on the meta device were made.

    Example:
        >>> known, mask = KnownValues(), torch.ones(3, device="meta", dtype=torch.bool)
        >>> known.note(torch.ops.aten.ones.default, ([3],), {"dtype": torch.bool, "device": "meta"}, [mask])
        >>> known.item(mask[:1]) is None, known.tensor(mask)
        (True, tensor([True, True, True]))
    """

    def __init__(self):
        self._made: dict[int, tuple] = {}  # id → (tensor, func, args, kwargs, its number among the results)
        self._values: dict[int, Tensor] = {}

    def note(self, func, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        """An op has run; it is remembered if its results depend on nothing that is unknown."""
        if not self._made and func.overloadpacket.__name__ not in _MADE_OF_NOTHING:
            return
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not all(id(x) in self._made for x in inputs):
            return
        if func._schema.is_mutable:  # it may have changed others, too, that share its memory
            self._made.clear()
            self._values.clear()
        elif inputs or func.overloadpacket.__name__ in _MADE_OF_NOTHING:
            if torch.Tag.nondeterministic_seeded not in func.tags:
                for number, output in enumerate(outputs):
                    self._made[id(output)] = (output, func, args, kwargs, number)

    def item(self, tensor: Tensor) -> Any:
        """The only value of a tensor; None where it is not known."""
        value = self.tensor(tensor)
        return None if value is None else value.item()

    def tensor(self, tensor: Tensor) -> Tensor | None:
        """The tensor with its values, on the CPU; None where they are not known."""
        key = id(tensor)
        if key not in self._made:
            return None
        if key not in self._values:
            _, func, args, kwargs, number = self._made[key]
            args, kwargs = tree_map(self._real, (args, dict(kwargs)))
            result = func(*args, **kwargs)
            self._values[key] = result if isinstance(result, Tensor) else result[number]
        return self._values[key]

    def _real(self, x):
        if isinstance(x, Tensor):
            return self.tensor(x)
        return torch.device("cpu") if isinstance(x, torch.device) or x == "meta" else x
