"""What a slim network has lost, measured on images: the truth that ends every pruning."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import torch
from torch import nn

from ..maps.batches import images_of, labels_of
from ..maps.distance import class_scores, gives_logits, output_distance
from ..pruning.result import LossLine
from ..slim.example_inputs import example_dtype
from ..slim.modes import eval_mode


def measure_loss(slim: nn.Module, original: nn.Module, loader: Iterable, *, recovered: bool) -> LossLine:
    """Compare the outputs of two networks on at most 512 images; with labels, their accuracies too.

    Example:
        >>> measure_loss(model, model, loader, recovered=False).measured
        0.0
    """
    device = next(slim.parameters()).device
    distance, same, images = 0.0, 0, 0
    right = [0, 0]
    labelled = logits = True
    with eval_mode(slim, original), torch.no_grad():
        for batch in loader:
            x = images_of(batch).to(device, example_dtype(slim))[: LossLine.MOST_IMAGES - images]
            labels = labels_of(batch)
            before, after = original(x), slim(x)
            logits = gives_logits(original, before)
            distance += float(output_distance(before, after, logits).double().sum())
            images += len(x)
            labelled = labelled and labels is not None and logits
            if logits:
                seen = class_scores(before).argmax(1), class_scores(after).argmax(1)
                same += int((seen[0] == seen[1]).sum())
                if labelled:
                    labels = labels.to(device)[: len(x)]
                    right = [r + int((s == labels).sum()) for r, s in zip(right, seen, strict=True)]
            if images >= LossLine.MOST_IMAGES:
                break
    top1 = [100 * r / images for r in right] if labelled else [None, None]
    kind = "KL divergence" if logits else "squared error"
    return LossLine(kind, distance / images, images, recovered, same / images if logits else None, *top1)


def recovered_if_better(
    slim: nn.Module, original: nn.Module, loader: Iterable, recover: Callable[[], object]
) -> tuple[LossLine, str]:
    """Call what recovers the slim network in place, and take it back where the network then loses more on the images.

    A handful of images may say less about a layer than its old weights do.

    Returns:
        what is lost now, and a warning in plain words if recovery was taken back.

    Example:
        >>> small = prune(model, loader, budget=Budget(macs=0.5), recover=False).model
        >>> loss, warning = recovered_if_better(small, model, loader, lambda: small.linear.weight.data.mul_(-9))
        >>> loss.recovered, warning.partition(":")[0]
        (False, 'recovery was taken back')
    """
    before, state = measure_loss(slim, original, loader, recovered=False), copy.deepcopy(slim.state_dict())
    recover()
    after = measure_loss(slim, original, loader, recovered=True)
    if after.measured <= before.measured or math.isnan(before.measured):
        return after, ""
    slim.load_state_dict(state)
    return before, (
        f"recovery was taken back: with it the network loses more on these {before.images} images ({before.kind} "
        f"{after.measured:.3g}, {before.measured:.3g} without); a few hundred images do better"
    )


def collapse_warning(model: str, loss: LossLine, group_losses: Mapping[str, float]) -> str:
    """A warning in plain words with the way out, or an empty text where the network has kept most of what it knew.

    Example:
        >>> lost = LossLine("KL divergence", 3.2, 100, recovered=True, agreement=0.2)
        >>> collapse_warning("resnet18", lost, {"layer1.0.conv1": 2.0}).partition(". ")[0]
        'resnet18 has collapsed: the same class as the original on 20.0% of the 100 images given'
    """
    if not loss.collapsed:
        return ""
    costly = ", ".join(islice(group_losses, 3))
    most = f" The groups that lose most are {costly}; they can be left alone (ignore)." if costly else ""
    way = "ask for a larger budget, or fine-tune"
    if not loss.recovered:
        way = "recover it with images, ask for a larger budget, or fine-tune"
    return f"{model} has collapsed: {loss}. To get it back, {way}.{most}"
