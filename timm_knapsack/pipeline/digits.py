"""Scikit-learn's handwritten digits, each among scraps of others: real images that need no download.

The bare digits are too easy to show anything: 6 % of a small network's MACs see 99 % of them. So each one is put
somewhere into a larger picture, with four scraps of other digits, as in "cluttered MNIST".
"""

from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import KnapsackError

TEST_IMAGES = 450  # of 1797 digits, held out
SIDE, DIGIT, SCRAP = 32, 18, 8  # pixels of a picture, of the digit in it, of a scrap
SCRAPS = 4
PICTURES = 2  # of each digit that is trained on

Labelled = tuple[np.ndarray, np.ndarray]


def load_digits() -> tuple[Labelled, Labelled]:
    """Pictures of scikit-learn's 1797 digits as (images, labels), for training and held out; uint8 [n, 32, 32, 3].

    Example:
        >>> (images, labels), held_out = load_digits()
        >>> images.shape, held_out[0].shape
        ((2694, 32, 32, 3), (450, 32, 32, 3))
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise KnapsackError("the quickstart needs scikit-learn: pip install 'timm-knapsack[quickstart]'") from None
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    small = (digits.images[order] * (255 / 16)).round().astype(np.uint8)  # 8 × 8
    drawn = np.stack([np.asarray(Image.fromarray(one).resize((DIGIT, DIGIT), Image.BILINEAR)) for one in small])
    labels = digits.target[order]
    train = np.concatenate([_cluttered(drawn[TEST_IMAGES:], seed) for seed in range(PICTURES)])
    held_out = _cluttered(drawn[:TEST_IMAGES], PICTURES)
    return (train, np.tile(labels[TEST_IMAGES:], PICTURES)), (held_out, labels[:TEST_IMAGES])


def _cluttered(digits: np.ndarray, seed: int) -> np.ndarray:
    """Each digit at a random place of its own picture, on scraps of others."""
    random = np.random.default_rng(seed)
    pictures = np.zeros((len(digits), SIDE, SIDE), np.uint8)
    for picture, digit in zip(pictures, digits, strict=True):
        for _ in range(SCRAPS):
            top, left = random.integers(0, DIGIT - SCRAP + 1, 2)
            scrap = digits[random.integers(len(digits))][top : top + SCRAP, left : left + SCRAP]
            _lay(picture, scrap, random)
        _lay(picture, digit, random)
    return np.repeat(pictures[..., None], 3, axis=3)


def _lay(picture: np.ndarray, piece: np.ndarray, random: np.random.Generator) -> None:
    top, left = random.integers(0, SIDE - len(piece) + 1, 2)
    place = picture[top : top + len(piece), left : left + len(piece)]
    np.maximum(place, piece, out=place)


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
