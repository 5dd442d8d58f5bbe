"""Other views of the same images: resized crops, mirrored, a little brighter or paler; tensors in, tensors out.

What a network gives for images it was trained on says little: it knows them by heart. For views of them it is about as
unsure as for images it has never seen. A teacher has an answer for any view, so no label is needed. It has one for two
images that are mixed, too, and there are many more pairs than images: a student that learns from a thousand images by
gradients learns them by heart from views, and does not from mixtures.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_AREA = 0.5  # of the image that a crop shows
CONTRAST = 0.4
BRIGHTNESS = 0.3  # in standard deviations of normalised images


def random_views(images: Tensor, seed: int, share: float = 0.5, strength: float = 1.0) -> Tensor:
    """A view of each image, in the images' own size; those that are not drawn stay as they are.

    Args:
        images: [images, channels, height, width], normalised.
        seed: fixes the views.
        share: of the images that are changed, on average.
        strength: of the changes; at 0 images are at most mirrored.

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> torch.equal(random_views(images, seed=0, share=0.0), images)
        True
        >>> random_views(images, seed=1).shape
        torch.Size([4, 3, 8, 8])
    """
    draw = torch.Generator().manual_seed(seed)
    count = len(images)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=draw)

    side = uniform(1 - strength * (1 - LEAST_AREA), 1.0).sqrt()
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = side * torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = side
    theta[:, 0, 2], theta[:, 1, 2] = (1 - side) * uniform(-1, 1), (1 - side) * uniform(-1, 1)
    paler, brighter = strength * CONTRAST, strength * BRIGHTNESS
    contrast, brightness = uniform(1 - paler, 1 + paler), uniform(-brighter, brighter)
    changed = (uniform(0, 1) < share).nonzero().flatten()
    if not len(changed):
        return images
    views = images.clone()
    chosen = images[changed]
    grid = F.affine_grid(theta[changed], list(chosen.shape), align_corners=False).to(images)
    seen = F.grid_sample(chosen, grid, padding_mode="reflection", align_corners=False)
    shape = -1, 1, 1, 1
    views[changed] = seen * contrast[changed].reshape(shape).to(images) + brightness[changed].reshape(shape).to(images)
    return views


def mixed_views(images: Tensor, seed: int) -> Tensor:
    """Views of which each is mixed with another: blended where the seed is even, a box of it pasted in where it is odd.

    Args:
        images: [images, channels, height, width], normalised.
        seed: fixes the views and the mixtures.

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> mixed_views(images, seed=0).shape
        torch.Size([4, 3, 8, 8])
    """
    views = random_views(images, seed)
    draw = torch.Generator().manual_seed(seed)
    count, _, height, width = images.shape
    others = views[torch.randperm(count, generator=draw).to(images.device)]

    def uniform() -> Tensor:
        return torch.rand(count, 1, 1, generator=draw)

    if seed % 2 == 0:
        return torch.lerp(views, others, uniform().unsqueeze(1).to(images))
    side = uniform().sqrt()
    inside = torch.ones(count, 1, 1, dtype=torch.bool)
    for length, shape in ((height, (1, -1, 1)), (width, (1, 1, -1))):
        start, place = (1 - side) * uniform() * length, torch.arange(length).reshape(shape)
        inside = inside & (place >= start) & (place < start + side * length)
    return torch.where(inside.unsqueeze(1).to(images.device), others, views)
