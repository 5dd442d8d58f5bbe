"""What a pruned network must beat: the unpruned one on smaller images, and smaller networks as they are."""

import math
from pathlib import Path
from typing import Any

from ..costs.counted import count_macs
from ..models.model_source import ModelSource
from ..slim.example_inputs import example_input
from ..training.evaluation import evaluate

ORIGINAL, RECOVERED = "original", "pruned and recovered"
SMALLER, STOCK = "original, smaller images", "stock network"


def smaller_images(job: Any, side: int) -> dict[str, Any]:
    """A row of the trade-off: the job's network on images of another size."""
    metrics = evaluate(job["base"], job.open("evaluation", input_size=side), job.accelerator)
    macs = count_macs(job["base"], (example_input(job["base"])[1], side, side))
    return {"what": f"{side} px", "kind": SMALLER, "macs": macs, "top1": metrics["top1"], "side": side}


def sides_for(side: int, shares: Any) -> list[int]:
    """Sizes of images at which a network of convs has about these shares of its MACs, in whole steps of its strides.

    Example:
        >>> sides_for(224, [0.9, 0.5, 0.3]), sides_for(32, [0.5])
        ([208, 160, 128], [24])
    """
    step = 32 if side >= 256 else 16 if side >= 128 else 4
    found = {max(step, round(side * math.sqrt(share) / step) * step) for share in shares}
    return sorted((one for one in found if one < side), reverse=True)


def stock(job: Any, text: str) -> tuple[dict[str, Any], Any]:
    """A row of the trade-off, and the network: ``NAME=WEIGHTS.safetensors``, a folder, or a timm name."""
    name, _, weights = text.partition("=")
    model = ModelSource(name, weights=weights or None, args=_same_classes(job)).load().to(job.device)
    metrics = evaluate(model, job.open("evaluation", model=model), job.accelerator)
    return {"what": Path(name).name, "kind": STOCK, "macs": count_macs(model), "top1": metrics["top1"]}, model


def _same_classes(job: Any) -> dict[str, Any]:
    classes = job.source.args.get("num_classes")
    return {} if classes is None else {"num_classes": classes}
