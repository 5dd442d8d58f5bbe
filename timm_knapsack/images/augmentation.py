"""From an image to the tensor a model takes: timm's transforms, with random numbers that belong to the sample.

Two ways through:

* ``Transform.images`` takes PIL images through timm's own transforms.
* ``Transform.pixels`` takes a uint8 array of small images that already have the model's size (CIFAR) and does crop,
  flip and normalisation for the whole batch at once. Where both apply they give the same bits.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_data_config
from timm.data.auto_augment import AugmentOp, posterize
from torch import nn
from torchvision.transforms import Compose

from ..errors import DataError
from .sampling import SampleRandomness

CROPS = ("auto", "pad", "rrc", "rkrc", "rkrr", "none")
SMALL = 64  # inputs up to this many pixels are cropped from a padded image, larger ones with a random resize
MODES = {1: "L", 3: "RGB"}  # PIL's image mode for a number of input channels


@dataclass(frozen=True)
class Augmentation:
    """What a training loader does to an image. Names and meanings are those of timm's ``create_transform``.

    Attributes:
        crop: ``"pad"`` pads by ``pad`` pixels and crops the input size, the usual choice for CIFAR; ``"rrc"`` (random
            resized crop), ``"rkrc"`` and ``"rkrr"`` are timm's; ``"none"`` switches all augmentation off; ``"auto"`` is
            ``"pad"`` for inputs of at most 64 pixels and ``"rrc"`` above.
        pad: zero pixels on each side for ``"pad"``.
        scale, ratio: area and aspect ratio of the crop, for timm's crops.
        hflip, vflip: probability of a mirror image.
        color_jitter: strength, or one for brightness, contrast, saturation (and hue); None for no jitter.
        auto_augment: timm's policy string such as ``"rand-m9-mstd0.5-inc1"``.
        re_prob, re_mode, re_count: random erasing.
        interpolation: for resizing; None for the model's own, ``"random"`` for either of two.

    Example:
        >>> Augmentation.read({"crop": "pad", "hflip": 0})
        Augmentation(crop='pad', pad=4, scale=(0.08, 1.0), ratio=(0.75, 1.3333333333333333), hflip=0, vflip=0.0, \
color_jitter=None, auto_augment=None, re_prob=0.0, re_mode='pixel', re_count=1, interpolation=None)
    """

    crop: str = "auto"
    pad: int = 4
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float | tuple[float, ...] | None = None
    auto_augment: str | None = None
    re_prob: float = 0.0
    re_mode: str = "pixel"
    re_count: int = 1
    interpolation: str | None = None

    def __post_init__(self):
        if self.crop not in CROPS:
            raise DataError(f"augmentation crop={self.crop!r} is none of {', '.join(CROPS)}")
        for name in ("scale", "ratio", "color_jitter"):  # YAML knows only lists; a frozen object should hash
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in ("hflip", "vflip", "re_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"augmentation {name}={getattr(self, name)} is not a probability from 0 to 1")
        if self.pad < 0:
            raise DataError(f"augmentation pad={self.pad} is negative")

    @classmethod
    def read(cls, options: "Augmentation | Mapping[str, Any] | None") -> "Augmentation":
        """From a mapping such as a recipe's; an unknown key is answered with the right one."""
        if isinstance(options, cls):
            return options
        options = dict(options or {})
        check_names(options, cls, "augmentation")
        return cls(**options)


def check_names(options: Mapping[str, Any], dataclass: type, what: str) -> None:
    """Raise a DataError for the first key that is no field of ``dataclass``, with the nearest one that is."""
    known = [field.name for field in fields(dataclass)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise DataError(f"unknown {what} option {name!r}; {hint}")


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects of its input, as timm's data config says.

    Example:
        >>> Preprocessing.read({"input_size": (3, 32, 32), "crop_pct": 1.0}).input_size
        (3, 32, 32)
    """

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str

    @classmethod
    def read(
        cls, model_or_config: nn.Module | Mapping[str, Any], input_size: int | Sequence[int] | None = None
    ) -> "Preprocessing":
        """From a timm model, or from a mapping such as its ``pretrained_cfg``; ``input_size`` overrides either."""
        if isinstance(model_or_config, nn.Module):
            config = dict(getattr(model_or_config, "pretrained_cfg", None) or {})
            channels = getattr(model_or_config, "in_chans", None)
        elif isinstance(model_or_config, Mapping):
            config, channels = dict(model_or_config), None
        else:
            kind = type(model_or_config).__name__
            raise DataError(f"create_loader needs a timm model or its data config as a mapping, not a {kind}")
        resolved = resolve_data_config(pretrained_cfg=config or {"input_size": None})
        size = tuple(resolved["input_size"])
        if isinstance(input_size, int):
            size = (size[0], input_size, input_size)
        elif input_size is not None:
            size = (size[0], *input_size) if len(input_size) == 2 else tuple(input_size)
        size = (channels or size[0], *size[1:])  # a model made with in_chans=1 keeps the old input_size in its config
        if size[0] not in MODES:
            raise DataError(f"images have 1 or 3 channels, but the model takes {size[0]}")
        mean, std = (_fit_channels(resolved[key], size[0]) for key in ("mean", "std"))
        return cls(size, mean, std, resolved["interpolation"], resolved["crop_pct"], resolved["crop_mode"])

    @property
    def mode(self) -> str:
        return MODES[self.input_size[0]]


def _fit_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """The statistics of three channels serve a grey image as their average."""
    values = tuple(float(v) for v in values)
    if len(values) == channels:
        return values
    return (sum(values) / len(values),) * channels


def _mend_posterize(augment) -> None:
    """Let timm's policies keep 0 bits, as they do at full strength: Pillow 13 refuses, before it gave a black image."""
    waiting = list(augment.transforms)
    while waiting:
        item = waiting.pop()
        if isinstance(item, AugmentOp):
            if item.aug_fn is posterize:
                item.aug_fn = _posterize
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        else:  # RandAugment and AugMix keep their operations in `ops`, AutoAugment in `policy`
            waiting.extend(getattr(item, "ops", ()) or getattr(item, "policy", ()))


def _posterize(image: Image.Image, bits: int, **_) -> Image.Image:
    return Image.new(image.mode, image.size) if bits == 0 else image if bits >= 8 else ImageOps.posterize(image, bits)


class Transform:
    """Turns images into a batch of tensors; the random numbers of each image come from its key alone.

    Args:
        preprocessing: what the model expects.
        augmentation: for training; None for evaluation.
    """

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation | None = None):
        self.preprocessing = preprocessing
        self.augmentation = augmentation
        self.height, self.width = preprocessing.input_size[1:]
        crop = augmentation.crop if augmentation else "none"
        if crop == "auto":
            crop = "pad" if max(self.height, self.width) <= SMALL else "rrc"
        self.crop = crop
        _ = self._steps  # a wrong option shows now, not in the first batch

    @cached_property
    def _steps(self):
        config, augmentation = self.preprocessing, self.augmentation
        common = {"input_size": config.input_size, "mean": config.mean, "std": config.std}
        if augmentation is None or self.crop == "none":
            return create_transform(
                **common, interpolation=config.interpolation, crop_pct=config.crop_pct, crop_mode=config.crop_mode
            )
        try:
            first, second, last = create_transform(
                **common,
                is_training=True,
                separate=True,
                train_crop_mode=None if self.crop == "pad" else self.crop,
                scale=augmentation.scale,
                ratio=augmentation.ratio,
                hflip=augmentation.hflip,
                vflip=augmentation.vflip,
                color_jitter=augmentation.color_jitter,
                auto_augment=augmentation.auto_augment,
                interpolation=augmentation.interpolation or config.interpolation,
                re_prob=augmentation.re_prob,
                re_mode=augmentation.re_mode,
                re_count=augmentation.re_count,
            )
        except (AssertionError, ValueError, KeyError, IndexError, TypeError) as error:  # timm asserts on its options
            reason = str(error) or type(error).__name__
            raise DataError(f"timm can't build this augmentation: {reason}; {augmentation}") from error
        _mend_posterize(second)
        return Compose([*([] if self.crop == "pad" else [first]), second, last])

    @property
    def is_random(self) -> bool:
        return self.augmentation is not None and self.crop != "none"

    def takes_pixels(self, height: int, width: int) -> bool:
        """True if ``pixels`` serves images of this size: nothing to resize, and no more than pad, crop and flip."""
        if (height, width) != (self.height, self.width):
            return False
        if not self.is_random:
            config = self.preprocessing
            return all(int(size // config.crop_pct) == size for size in (height, width))
        extra = self.augmentation.color_jitter, self.augmentation.auto_augment, self.augmentation.re_prob
        return self.crop == "pad" and not any(extra)

    def images(self, images: Sequence[Image.Image], keys: np.ndarray) -> list[torch.Tensor]:
        """A tensor for each PIL image."""
        if not self.is_random:
            return [self._steps(image) for image in images]
        if self.crop == "pad":
            images = [self._pad_crop_flip(image, *draw) for image, draw in zip(images, self._draws(keys), strict=True)]
        tensors = []
        with SampleRandomness() as randomness:
            for image, key in zip(images, keys, strict=True):
                randomness.seed(int(key))
                tensors.append(self._steps(image))
        return tensors

    def pixels(self, pixels: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        """The float batch of a uint8 array [n, channels, height, width]."""
        if self.is_random:
            pixels = self._pad_crop_flip_all(pixels, keys)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.preprocessing.mean, self.preprocessing.std))
        return torch.from_numpy(pixels).float().div_(255).sub_(mean).div_(std)  # the order of torchvision's own steps

    def _draws(self, keys: np.ndarray) -> np.ndarray:
        """For each key: top and left corner in the padded image, mirrored left-right, upside down; from its bits."""
        side = np.uint64(2 * self.augmentation.pad + 1)
        bits = [(keys >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
        flips = [bits[2] < self.augmentation.hflip * 2**16, bits[3] < self.augmentation.vflip * 2**16]
        return np.stack([bits[0] % side, bits[1] % side, *flips], axis=1).astype(np.int64)

    def _pad_crop_flip(self, image: Image.Image, top: int, left: int, mirror: int, upside: int) -> Image.Image:
        if image.size != (self.width, self.height):
            image = image.resize((self.width, self.height), Image.Resampling.BICUBIC)
        image = ImageOps.expand(image, self.augmentation.pad)
        image = image.crop((left, top, left + self.width, top + self.height))
        image = ImageOps.mirror(image) if mirror else image
        return ImageOps.flip(image) if upside else image

    def _pad_crop_flip_all(self, pixels: np.ndarray, keys: np.ndarray) -> np.ndarray:
        pad = self.augmentation.pad
        padded = np.pad(pixels, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        out = np.empty_like(pixels)
        for image, source, (top, left, mirror, upside) in zip(out, padded, self._draws(keys).tolist(), strict=True):
            cut = source[:, top : top + self.height, left : left + self.width]
            image[...] = cut[:, :: -1 if upside else 1, :: -1 if mirror else 1]
        return out
