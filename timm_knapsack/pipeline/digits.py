"""Scikit-learn's handwritten digits: real images that need no download."""

from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import KnapsackError

TEST_IMAGES = 450  # of 1797, held out


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Scikit-learn's 1797 handwritten digits as (images, labels), for training and held out; uint8 [n, 32, 32, 3].

    Example:
        >>> (images, labels), held_out = load_digits()
        >>> images.shape
        (1347, 32, 32, 3)
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise KnapsackError("the quickstart needs scikit-learn: pip install 'timm-knapsack[quickstart]'") from None
    digits = datasets.load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)
    images = images.repeat(4, axis=1).repeat(4, axis=2)  # 8 × 8 → 32 × 32
    images = np.repeat(images[..., None], 3, axis=3)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def write_images(folder: str | Path) -> Path:
    """The digits as PNG files, ``train`` and ``test`` with a folder for each class: data for the command line.

    Example:
        >>> sorted(path.name for path in write_images("images").iterdir())
        ['test', 'train']
    """
    folder = Path(folder)
    for split, (images, labels) in zip(("train", "test"), load_digits(), strict=True):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / split / str(label) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return folder
