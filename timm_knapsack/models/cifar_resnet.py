"""The CIFAR ResNets of He et al. (2015), depths 20 to 110, as ordinary timm models.

They are built for 32 × 32 images: a 3 × 3 stem, three stages of 16, 32 and 64 channels, and option-A shortcuts, which
have no parameters: every second pixel, with zero channels on both sides. The parameter names are those of the usual
published weights, so that these load with ``strict=True``.

Nothing in ``forward`` knows a channel count. The widths are those of the weights, and the zero channels of a shortcut
are two integers, ``pad_left`` and ``pad_right``, which may have any value ≥ 0: a pruned stage keeps working.
"""

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import create_classifier
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import nn
from torch.nn import functional as F

__all__ = ["BasicBlock", "CifarResNet", "PadShortcut"]  # a list: register_model appends every entrypoint


class PadShortcut(nn.Module):
    """Option-A shortcut: keep every second pixel, then add zero channels before and after. It has no parameters.

    Example:
        >>> PadShortcut(8, 8)(torch.ones(1, 16, 32, 32)).shape
        torch.Size([1, 32, 16, 16])
    """

    def __init__(self, pad_left: int, pad_right: int):
        super().__init__()
        self.pad_left = pad_left
        self.pad_right = pad_right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad_left, self.pad_right))

    def extra_repr(self) -> str:
        return f"pad_left={self.pad_left}, pad_right={self.pad_right}"


class BasicBlock(nn.Module):
    """Two 3 × 3 convs and a shortcut; stride 2 where a stage begins.

    Example:
        >>> BasicBlock(16, 32, stride=2)(torch.ones(1, 16, 32, 32)).shape
        torch.Size([1, 32, 16, 16])
    """

    def __init__(self, in_chs: int, out_chs: int, stride: int = 1, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_chs, out_chs, 3, stride=stride, padding=1, bias=False, **dd)
        self.bn1 = nn.BatchNorm2d(out_chs, **dd)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_chs, out_chs, 3, padding=1, bias=False, **dd)
        self.bn2 = nn.BatchNorm2d(out_chs, **dd)
        self.act2 = nn.ReLU(inplace=True)
        new = out_chs - in_chs
        self.shortcut = nn.Identity() if stride == 1 else PadShortcut(new // 2, new - new // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.act2(x + shortcut)


class CifarResNet(nn.Module):
    """A ResNet for 32 × 32 images with three stages of ``(depth - 2) / 6`` blocks each.

    Args:
        depth: layers with weights: 20, 32, 44, 56, 110, or any other ``6 n + 2``.
        num_classes: outputs of the classifier; 0 leaves the pooled features.
        in_chans: channels of the input image.
        global_pool: timm's pooling type; ``''`` for none.
        drop_rate: dropout before the classifier.
        channels: width of each stage.

    Example:
        >>> CifarResNet(20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        channels: tuple[int, ...] = (16, 32, 64),
        device=None,
        dtype=None,
    ):
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"a CIFAR ResNet has depth 6 n + 2 (8, 14, 20, …), not {depth}")
        dd = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.grad_checkpointing = False

        self.conv1 = nn.Conv2d(in_chans, channels[0], 3, padding=1, bias=False, **dd)
        self.bn1 = nn.BatchNorm2d(channels[0], **dd)
        self.act1 = nn.ReLU(inplace=True)
        self.feature_info = [{"num_chs": channels[0], "reduction": 1, "module": "act1"}]
        in_chs = channels[0]
        stages = []
        for stage, out_chs in enumerate(channels):
            first = BasicBlock(in_chs, out_chs, stride=2 if stage else 1, **dd)
            stages.append(nn.Sequential(first, *(BasicBlock(out_chs, out_chs, **dd) for _ in range(blocks - 1))))
            self.feature_info.append({"num_chs": out_chs, "reduction": 2**stage, "module": f"layer{stage + 1}"})
            in_chs = out_chs
        self.layer1, self.layer2, self.layer3 = stages

        self.num_features = self.head_hidden_size = channels[-1]
        self.global_pool, self.linear = create_classifier(self.num_features, num_classes, pool_type=global_pool, **dd)
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self, name_only: bool = False) -> str | nn.Module:
        return "linear" if name_only else self.linear

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        weight = self.conv1.weight
        self.num_classes = num_classes
        self.global_pool, self.linear = create_classifier(
            self.num_features, num_classes, pool_type=global_pool, device=weight.device, dtype=weight.dtype
        )
        self.global_pool.train(self.training)
        self.linear.train(self.training)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]:
        """Features and the chosen intermediates: 0 is the stem, 1 to 3 the stages; arguments as in timm's models."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        intermediates = []
        x = self.act1(self.bn1(self.conv1(x)))
        if 0 in take_indices:
            intermediates.append(x)
        stages = [self.layer1, self.layer2, self.layer3]
        for index, stage in enumerate(stages[:max_index] if stop_early else stages, start=1):
            x = stage(x)
            if index in take_indices:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop the stages after the last of ``indices``, and the head; as in timm's models."""
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        for stage in ("layer1", "layer2", "layer3")[max_index:]:
            setattr(self, stage, nn.Identity())
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq([self.layer1, self.layer2, self.layer3], x, flatten=True)
        x = self.layer1(x)
        x = self.layer2(x)
        return self.layer3(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.global_pool(x)
        if self.drop_rate:
            x = F.dropout(x, p=float(self.drop_rate), training=self.training)
        return x if pre_logits else self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def _cfg(**kwargs) -> dict:
    return {
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "pool_size": (8, 8),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN,  # what the published weights were trained with, not CIFAR's own statistics
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "conv1",
        "classifier": "linear",
        **kwargs,
    }


# No weights are hosted under these names: `untrained` has neither a URL nor a Hub id.
default_cfgs = generate_default_cfgs(
    {f"cifar_resnet{variant}.untrained": _cfg() for variant in ("8x2", 20, 32, 44, 56, 110)}
)


def _create_cifar_resnet(variant: str, pretrained: bool, depth: int, **kwargs) -> CifarResNet:
    return build_model_with_cfg(
        CifarResNet, variant, pretrained, feature_cfg={"out_indices": (0, 1, 2, 3)}, depth=depth, **kwargs
    )


@register_model
def cifar_resnet8x2(pretrained: bool = False, **kwargs) -> CifarResNet:
    """CIFAR ResNet-8, twice as wide as usual: 0.31 M parameters, 48.1 M MACs.

    Trained in minutes on a CPU: the network of the quickstart.
    """
    kwargs = {"channels": (32, 64, 128), **kwargs}
    return _create_cifar_resnet("cifar_resnet8x2", pretrained, depth=8, **kwargs)


@register_model
def cifar_resnet20(pretrained: bool = False, **kwargs) -> CifarResNet:
    """CIFAR ResNet-20: 0.27 M parameters, 40.6 M MACs."""
    return _create_cifar_resnet("cifar_resnet20", pretrained, depth=20, **kwargs)


@register_model
def cifar_resnet32(pretrained: bool = False, **kwargs) -> CifarResNet:
    """CIFAR ResNet-32: 0.46 M parameters, 68.9 M MACs."""
    return _create_cifar_resnet("cifar_resnet32", pretrained, depth=32, **kwargs)


@register_model
def cifar_resnet44(pretrained: bool = False, **kwargs) -> CifarResNet:
    """CIFAR ResNet-44: 0.66 M parameters, 97.2 M MACs."""
    return _create_cifar_resnet("cifar_resnet44", pretrained, depth=44, **kwargs)


@register_model
def cifar_resnet56(pretrained: bool = False, **kwargs) -> CifarResNet:
    """CIFAR ResNet-56: 0.85 M parameters, 125.5 M MACs."""
    return _create_cifar_resnet("cifar_resnet56", pretrained, depth=56, **kwargs)


@register_model
def cifar_resnet110(pretrained: bool = False, **kwargs) -> CifarResNet:
    """CIFAR ResNet-110: 1.73 M parameters, 252.9 M MACs."""
    return _create_cifar_resnet("cifar_resnet110", pretrained, depth=110, **kwargs)
