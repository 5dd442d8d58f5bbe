"""Images for scoring and recovery. Those without labels are labelled by the model itself: what it would say is what a
pruned copy should say too."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..maps.batches import images_of
from ..slim.modes import eval_mode

# Options of create_loader: the training split, as for training, but each image as the model sees it in evaluation.
CALIBRATION = {"training": True, "augmentation": {"crop": "none"}, "drop_last": False, "shuffle": True}


class ModelLabels:
    """The batches of a loader, each image labelled with the class that the model gives it.

    Scores from them rank the channels by how much each one matters for the model's own answers.

    Example:
        >>> model = nn.Flatten()
        >>> model.weight = nn.Parameter(torch.ones(1))
        >>> [labels.tolist() for _, labels in ModelLabels([(torch.eye(3), torch.full((3,), -1))], model)]
        [[0, 1, 2]]
    """

    def __init__(self, loader: Iterable[Any], model: nn.Module):
        self.loader, self.model = loader, model

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = next(self.model.parameters()).device
        for batch in self.loader:
            images = images_of(batch).to(device)
            with eval_mode(self.model), torch.no_grad():
                labels = self.model(images).argmax(dim=1)
            yield images, labels
