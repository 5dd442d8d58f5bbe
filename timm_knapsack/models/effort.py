"""A limit on what a stranger's arguments may make of a base model, checked where nothing is allocated.

The base is built on the meta device, and every call of torch is counted on the way. Arguments may make it a few times
larger than timm's own, or somewhat larger in absolute terms (a small base with 21 841 classes); more is refused at the
call where the limit is passed, so the refusal takes no longer than building the base.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from timm.models import get_pretrained_cfg, model_entrypoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ChannelConfigError

FACTOR = 4  # of what the base takes by itself; twice its image size is four times its positions
MORE_CALLS = 5_000  # a small network's own are some thousands
MORE_ELEMENTS = 2**25  # 128 MiB of float32: 21 841 classes of 1280 features are 28 million
MORE_WORK = 2**28  # elements of all results together, views and initialisation included


class Effort(NamedTuple):
    """What building a model took: calls of torch, elements of all their results, and of the largest one.

    Example:
        >>> Effort(10, 100, 20).allowed().calls
        5040
    """

    calls: int
    work: int
    largest: int

    def allowed(self) -> "Effort":
        more = MORE_CALLS, MORE_WORK, MORE_ELEMENTS
        return Effort(*(FACTOR * taken + extra for taken, extra in zip(self, more, strict=True)))


NOTHING = Effort(0, 0, 0)


def build_within_limits(base: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """A timm model on the meta device; an error if these arguments make it several times larger than without them.

    Example:
        >>> build_within_limits("resnet18", {"num_classes": 10}).fc.out_features
        10
        >>> build_within_limits("resnet18", {"num_classes": 2**20})
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.ChannelConfigError: num_classes=1048576 makes resnet18 several times larger than ...
    """
    kwargs = dict(kwargs)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    count = _Counting(lambda: _plain_effort(base).allowed(), what=f"{_shown(kwargs)} makes {base}")
    try:
        _check_image_size(base, kwargs.get("img_size"))
        with torch.device("meta"), count:
            model = model_entrypoint(base)(pretrained=False, **kwargs)
    except ChannelConfigError:
        raise
    except Exception as error:  # whatever a foreign model raises about foreign arguments
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ChannelConfigError(
            f"the base model {base!r} can't be built with {_shown(kwargs)}: {reason[:300]}"
        ) from error
    count.check(sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())))
    return model


def _check_image_size(base: str, size: Any) -> None:
    """Some models work through all pairs of positions in Python, where no call of torch is seen."""
    if size is None:
        return
    sizes = [n for n in (size if isinstance(size, (list, tuple)) else (size,)) if isinstance(n, (int, float))]
    cfg = get_pretrained_cfg(base)
    own = max((*(cfg.input_size[1:] if cfg else ()), 256))
    if any(n > FACTOR * own for n in sizes):
        raise ChannelConfigError(
            f"img_size={str(size)[:60]} is more than {FACTOR} times {own}, the size that {base} is made for; is the "
            "config damaged?"
        )


def _shown(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items())[:300] or "its defaults"


class _Counting(TorchFunctionMode):
    """Counts what building takes. What the base takes by itself is only looked up beyond what is always allowed."""

    def __init__(self, allowed: Callable[[], Effort] | None = None, what: str = ""):
        super().__init__()
        self.calls = self.work = self.largest = 0
        self.limit, self.allowed, self.what = NOTHING.allowed(), allowed, what

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, Tensor):
            size = result.numel()
            self.work += size
            self.check(size)
        elif self.calls > self.limit.calls:
            self.check(0)
        return result

    def check(self, size: int) -> None:
        """Refuse to go on beyond the limit; ``size`` is the number of elements that exist at once, as far as seen."""
        self.largest = max(self.largest, size)
        if self.allowed is None or all(now <= most for now, most in zip(self.effort, self.limit, strict=True)):
            return
        self.limit = self.allowed()
        if any(now > most for now, most in zip(self.effort, self.limit, strict=True)):
            raise ChannelConfigError(
                f"{self.what} several times larger than timm's own; is the config damaged? If more classes are meant, "
                "build the model without num_classes and call its reset_classifier"
            )

    @property
    def effort(self) -> Effort:
        return Effort(self.calls, self.work, self.largest)


@lru_cache(maxsize=64)
def _plain_effort(base: str) -> Effort:
    with torch.device("meta"), _Counting() as count:
        model = model_entrypoint(base)(pretrained=False)
    whole = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    return count.effort._replace(largest=max(count.largest, whole))
