"""What must be done to an image before an exported network sees it: a JSON beside the file, and texts inside it."""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..files.versions import versions
from ..images.augmentation import Preprocessing
from ..runtimes.onnx_graph import INPUT, OUTPUT

FILE = "preprocessing.json"
FORMAT = "timm-knapsack preprocessing"
_READ = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "num_classes")


def describe(model: nn.Module, name: str, batch_size: int | None) -> dict[str, Any]:
    """Everything that a program needs to feed the network, as plain data.

    Args:
        name: what the network is called.
        batch_size: images that the file takes at once; None for any number.

    Example:
        >>> describe(model, "resnet20", None)["shape"]
        [None, 3, 32, 32]
    """
    own = Preprocessing.read(model)
    return {
        "format": FORMAT, "version": 1, "model": name, "input": INPUT, "output": OUTPUT,
        "shape": [batch_size, *own.input_size], "layout": "NCHW", "color": "RGB" if own.input_size[0] == 3 else "gray",
        "steps": "resize so that the crop is crop_pct of it, crop the centre, pixels ÷ 255, − mean, ÷ std",
        "input_size": list(own.input_size), "mean": list(own.mean), "std": list(own.std),
        "interpolation": own.interpolation, "crop_pct": own.crop_pct, "crop_mode": own.crop_mode,
        "num_classes": getattr(model, "num_classes", None),
        "versions": versions("timm-knapsack", "timm", "torch"),
    }  # fmt: skip


def as_texts(about: Mapping[str, Any]) -> dict[str, str]:
    """The same as texts, each value as JSON, for files that carry texts only.

    Example:
        >>> as_texts({"mean": [0.5], "layout": "NCHW"})
        {'mean': '[0.5]', 'layout': '"NCHW"'}
    """
    return {key: json.dumps(value) for key, value in about.items()}


def data_config(texts: Mapping[str, str]) -> dict[str, Any]:
    """The data config that `create_loader` takes, of the texts that a file carries; empty where it has none of ours.

    Example:
        >>> data_config({"format": '"timm-knapsack preprocessing"', "input_size": "[3, 32, 32]", "mean": "[0.5]"})
        {'input_size': [3, 32, 32], 'mean': [0.5]}
    """
    if texts.get("format") != json.dumps(FORMAT):
        return {}
    return {key: json.loads(texts[key]) for key in _READ if key in texts}
