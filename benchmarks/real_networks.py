"""Networks with real weights and real images, for the benchmarks; ../shared/data has them (facts.md says whence)."""

import os
from dataclasses import dataclass
from pathlib import Path

import timm_knapsack as tk  # noqa: F401  isort: skip  (before timm)
import timm
from safetensors.torch import load_file
from torch import nn

from timm_knapsack.images.loaders import create_loader

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
CIFAR = Path(os.environ.get("CIFAR10", "~/.cache/timm-knapsack/cifar10")).expanduser()  # ../shared/tools/get_cifar10.py


@dataclass(frozen=True)
class RealNetwork:
    """A trained network, images to score and recover with, and images to test on."""

    model: nn.Module
    train_images: Path
    test_images: Path
    train_split: str = "train"
    bottlenecks: tuple[str, ...] = ()  # linear ones without a shortcut: what they lose, nothing behind them has

    def train(self, **options):
        """A loader of training images, without augmentation."""
        return create_loader(self.train_images, self.model, split=self.train_split, **options)

    def test(self, **options):
        return create_loader(self.test_images, self.model, split="test", **options)


def resnet56() -> RealNetwork:
    """93.39 % of CIFAR-10's 10 000 test images."""
    return _cifar_resnet(56)


def resnet20() -> RealNetwork:
    """91.73 % of CIFAR-10's 10 000 test images."""
    return _cifar_resnet(20)


def _cifar_resnet(depth: int) -> RealNetwork:
    model = timm.create_model(f"cifar_resnet{depth}")
    model.load_state_dict(load_file(SHARED / f"weights/resnet{depth}.cifar10.safetensors"))
    return RealNetwork(model.eval(), CIFAR, CIFAR)


def lite0() -> RealNetwork:
    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(load_file(SHARED / "weights/tf_efficientnet_lite0.in1k.safetensors"))
    bottlenecks = ("blocks.0.0.conv_pw", "blocks.6.0.conv_pwl")
    return RealNetwork(model.eval(), SHARED / "imagenet_calibration", SHARED / "imagenet_val", bottlenecks=bottlenecks)


def resnet50() -> RealNetwork:
    """The v1 network: strides sit in the first conv of a stage; preprocessing as in facts.md."""
    model = timm.create_model("resnet50")
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    model.load_state_dict(load_file(SHARED / "weights/resnet50_v1.in1k.fp16.safetensors"))  # copied into float32
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "mean": (123.68 / 255, 116.779 / 255, 103.939 / 255),
        "std": (0.229, 0.224, 0.225),
        "input_size": (3, 224, 224),
        "crop_pct": 0.875,
    }
    return RealNetwork(model.eval(), SHARED / "imagenet_calibration", SHARED / "imagenet_val")


def deit_tiny() -> RealNetwork:
    """69.7 % of the validation images; its LayerNorm weights were rounded where it was found (facts.md)."""
    model = timm.create_model("deit_tiny_patch16_224")
    model.load_state_dict(load_file(SHARED / "weights/deit_tiny_patch16_224.in1k.fp16.safetensors"))
    return RealNetwork(model.eval(), SHARED / "imagenet_calibration", SHARED / "imagenet_val")


NETWORKS = {"resnet56": resnet56, "resnet20": resnet20, "lite0": lite0, "resnet50": resnet50, "deit_tiny": deit_tiny}
