"""What a slim network has lost, measured on images: the truth that ends every pruning."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import torch
from torch import nn

from ..maps.batches import images_of, labels_of
from ..maps.channels_last import side_by_side
from ..maps.distance import class_scores, gives_logits, output_distance
from ..pruning.result import LossLine
from ..slim.example_inputs import example_dtype
from ..slim.modes import eval_mode


class Yardstick:
    """What slim networks have lost against one original, whose outputs on at most 512 images are computed once.

    Example:
        >>> Yardstick(model, loader).loss_of(model, recovered=False).measured
        0.0
    """

    def __init__(self, original: nn.Module, loader: Iterable):
        device, dtype = next(original.parameters()).device, example_dtype(original)
        self.images = 0
        images, labels = [], []
        for batch in loader:
            images.append(images_of(batch).to(device, dtype)[: LossLine.MOST_IMAGES - self.images])
            known = labels_of(batch)
            labels.append(None if known is None else known.to(device)[: len(images[-1])])
            self.images += len(images[-1])
            if self.images >= LossLine.MOST_IMAGES:
                break
        images = side_by_side(images, original)
        with eval_mode(original), torch.no_grad():
            self._seen = [(x, y, original(x)) for x, y in zip(images, labels, strict=True)]
        self._logits = all(gives_logits(original, outputs) for _, _, outputs in self._seen)

    def loss_of(self, slim: nn.Module, *, recovered: bool) -> LossLine:
        """Compare the outputs; with labels, the accuracies too."""
        distance, same, right = 0.0, 0, [0, 0]
        labelled = self._logits and all(labels is not None for _, labels, _ in self._seen)
        with eval_mode(slim), torch.no_grad():
            for x, labels, before in self._seen:
                after = slim(x)
                distance += float(output_distance(before, after, self._logits).double().sum())
                if self._logits:
                    classes = class_scores(before).argmax(1), class_scores(after).argmax(1)
                    same += int((classes[0] == classes[1]).sum())
                    if labelled:
                        right = [r + int((c == labels).sum()) for r, c in zip(right, classes, strict=True)]
        top1 = [100 * r / self.images for r in right] if labelled else [None, None]
        kind = "KL divergence" if self._logits else "squared error"
        agreement = same / self.images if self._logits else None
        return LossLine(kind, distance / self.images, self.images, recovered, agreement, *top1)


def measure_loss(slim: nn.Module, original: nn.Module, loader: Iterable, *, recovered: bool) -> LossLine:
    """Compare the outputs of two networks on at most 512 images; with labels, their accuracies too.

    Example:
        >>> measure_loss(model, model, loader, recovered=False).measured
        0.0
    """
    return Yardstick(original, loader).loss_of(slim, recovered=recovered)


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
    yardstick = Yardstick(original, loader)
    before, state = yardstick.loss_of(slim, recovered=False), copy.deepcopy(slim.state_dict())
    recover()
    after = yardstick.loss_of(slim, recovered=True)
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
