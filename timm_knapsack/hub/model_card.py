"""The model card (README.md) of a saved or named pruned model, made from its files by huggingface_hub's ModelCard.

Nothing in it is written by hand, and no figure appears that was not counted or measured. The template is
``model_card_template.md`` beside this file (``model_cards/TEMPLATE.md`` in the repository).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ..costs.kinds import COSTS
from ..errors import HubError, KnapsackError, first_line, in_one_line
from ..models.foreign_config import read_saved_config
from ..models.pruned_models import pruned_model_config
from ..models.rebuild import base_on_meta, model_args_of, resized
from ..slim.channel_config import ChannelConfig
from ..version import __version__, install_command
from .markdown import code, python_text, repository, table, text

TEMPLATE = Path(__file__).with_name("model_card_template.md")
PICTURE = "kept_channels.png"
LICENSE = "apache-2.0"  # what timm's own cards say where a weight's config names no other


@dataclass(frozen=True)
class Evaluation:
    """An accuracy that was measured, in percent, as `timm_knapsack.evaluate` gives it.

    Attributes:
        dataset: id of the dataset on the Hub, or its name.
        split: such as ``"test"``.
        samples: how many images were counted.
        original_top1: the unpruned model's accuracy on the same images.

    Example:
        >>> Evaluation("uoft-cs/cifar10", top1=93.1, samples=10000, split="test").top5 is None
        True
    """

    dataset: str
    top1: float
    samples: int
    split: str | None = None
    top5: float | None = None
    loss: float | None = None
    original_top1: float | None = None

    @classmethod
    def read(cls, value: "Evaluation | Mapping[str, Any]") -> "Evaluation":
        if isinstance(value, cls):
            return value
        try:
            return cls(**value)
        except TypeError as error:
            raise HubError(f"evaluation {value!r}: {error}; the fields are {', '.join(cls.__annotations__)}") from None


def model_card(folder: str | os.PathLike, repo_id: str | None = None, name: str | None = None):
    """The card of a folder that `save_pretrained` wrote.

    Args:
        repo_id: where on the Hub it goes; the usage code then loads it from there.
        name: of the folder, if that is not yet its final one.

    Returns:
        ``huggingface_hub.ModelCard``: ``str()`` of it is the text, ``.data`` the metadata.
    """
    folder = Path(folder)
    config = read_saved_config(folder / "config.json")
    channels = ChannelConfig.load(folder / "channels.json")
    name = name or folder.resolve().name
    source = f"hf-hub:{repo_id}" if repo_id else f"local-dir:{name}"
    try:
        made = config["timm_knapsack"]
        return _render(
            title=repo_id.rpartition("/")[2] if repo_id else _local_title(channels.base, made["costs"], name),
            config=channels,
            usage=_usage(source, True, config["num_classes"], channels),
            pretrained_cfg=config["pretrained_cfg"],
            made=made,
            picture=PICTURE if (folder / PICTURE).exists() else None,
        )
    except KnapsackError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"its config.json can't be shown as a card ({first_line(error)}); is it damaged?"
        raise HubError(f"{folder}: {reason}") from error


def _local_title(base: str, costs: Sequence[Mapping[str, Any]], name: str) -> str:
    """The folder's name, which a user chose; ``model``, which the pipeline chose, says nothing: network and change."""
    first = costs[0]
    return name if name != "model" else f"{base} at {first['counted'] / first['original']:.0%} of its {first['unit']}"


def named_model_card(name: str):
    """The card of a named pruned model: what its channel config and timm's weights say.

    Example:
        >>> str(named_model_card("resnet50_knapsack_2g")).splitlines()[0]
        '---'
    """
    config = pruned_model_config(name)
    cfg = timm.get_pretrained_cfg(name)
    weights = bool(cfg.has_weights)
    made = {"costs": counted_costs(config), "base_model": cfg.hf_hub_id if weights else None}
    return _render(
        title=name,
        config=config,
        usage=_usage(name, weights, cfg.num_classes, config),
        pretrained_cfg=cfg.to_dict(),
        made=made,
        picture=None,
    )


def counted_costs(config: ChannelConfig, model=None, base: nn.Module | None = None) -> list[dict[str, Any]]:
    """The costs that every report shows, of the base and of the pruned network, counted on the meta device.

    A base that is not timm's says no input size: of its costs parameters alone are counted.
    """
    if base is not None:
        kind = COSTS["params"]
        line = {"original": kind.count(base, None), "counted": kind.count(model, None)}
        return [{"name": "params", "label": kind.label, "unit": kind.unit, **line}]
    base = base_on_meta(config, {**config.base_args, **(model_args_of(model) if model is not None else {})})
    slim = resized(base, config) if model is None else model
    return [
        {
            "name": name, "label": kind.label, "unit": kind.unit,
            "original": kind.count(base, None), "counted": kind.count(slim, None),
        }
        for name, kind in COSTS.items()
        if kind.always
    ]  # fmt: skip


def _render(title, config, usage, pretrained_cfg, made, picture):
    from huggingface_hub import ModelCard, ModelCardData

    evaluations = [Evaluation.read(value) for value in made.get("evaluation", ())]
    base_model = made.get("base_model")
    data = ModelCardData(
        license=made.get("license") or pretrained_cfg.get("license") or LICENSE,
        library_name="timm",
        pipeline_tag="image-classification",
        base_model=base_model,
        datasets=list(made.get("datasets", ())) or None,
        tags=["image-classification", "timm", "timm-knapsack", "pruning"],
        model_name=in_one_line(title) if evaluations else None,
        eval_results=[r for e in evaluations for r in _eval_results(e)] or None,
    )
    layers = [tuple(layer) for layer in made.get("layers", ())] or layer_widths(config)
    thinner = sum(kept < original for _, original, kept in layers)
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=text(title),
        cure=_cure(config),
        summary=_summary(config, made["costs"], base_model, evaluations),
        usage=usage,
        cost_table=_cost_table(made["costs"]),
        input_size=" × ".join(map(str, made.get("input_size") or pretrained_cfg.get("input_size", ()))) or "its size",
        asked=any(c.get("asked") is not None for c in made["costs"]),
        accuracy_table=_accuracy_table(evaluations),
        picture=picture,
        layer_summary=f"{thinner} of {len(layers)} convs and linears have fewer outputs",
        layer_table=table(["layer", "original", "kept"], [layer for layer in layers if layer[1] != layer[2]]),
        history=_history(config, made),
    )


def _usage(source: str, weights: bool, classes: int, config: ChannelConfig) -> str:
    if config.builder is not None:
        folder = source.removeprefix("local-dir:")
        return "\n".join(
            [
                "import timm_knapsack as tk",
                "",
                f"# this imports and calls {config.builder}: do it only where you trust that code",
                f"model = tk.load_pretrained({python_text(folder)}, builder={python_text(config.builder)})",
            ]
        )
    pretrained = ", pretrained=True" if weights else ""
    lines = [
        "import timm_knapsack  # first: it makes timm know the pruned architectures",
        "import timm",
        "import torch",
        "from PIL import Image",
        "",
        f"model = timm.create_model({python_text(source)}{pretrained}).eval()",
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)",
        "with torch.no_grad():",
        '    output = model(transform(Image.open("image.jpg").convert("RGB"))[None])',
    ]
    if classes:
        lines.append(f"print(output.softmax(dim=1).topk({min(5, classes)}))")
    elif config.features:
        dicts = config.features["class"] == "FeatureDictNet"
        lines.append(f"print([tuple(x.shape) for x in {'output.values()' if dicts else 'output'}])  # maps of features")
    else:
        lines.append("print(output.shape)  # the pooled features")
    return "\n".join(lines)


def _cure(config: ChannelConfig) -> str:
    """The first line: what to do where timm says ``Unknown model``."""
    install = install_command()
    if config.builder is not None:
        first = f"`{install}` first. " if install else ""
        return f"{first}Not a timm model: to load it takes timm-knapsack and the code of {code(config.builder)}."
    first = f"`{install}`, then" if install else f"It needs the package timm-knapsack {__version__}:"
    return f"{first} `import timm_knapsack` before `timm.create_model`. Without it timm answers `Unknown model`."


def _summary(config: ChannelConfig, costs, base_model: str | None, evaluations: Sequence[Evaluation]) -> str:
    parts = [f"{1 - c['counted'] / c['original']:.1%} fewer {text(c['unit'])}" for c in costs if _title(c) == c["unit"]]
    origin = f", from the weights of {repository(base_model)}" if base_model else ""
    kind = "An ordinary timm model." if config.builder is None else "An ordinary PyTorch module."
    kind = "An ordinary timm model that gives maps of features." if config.features else kind
    lines = [f"{code(config.base)} with {' and '.join(parts)}{origin}. {kind}"]
    for e in evaluations:
        before = "" if e.original_top1 is None else f", {e.top1 - e.original_top1:+.2f} against the unpruned network"
        lines.append(f"Top-1 on {text(e.dataset)}: {e.top1:.2f} %{before}.")
    return " ".join(lines)


def _cost_table(costs: Sequence[Mapping[str, Any]]) -> str:
    columns = [("original", "original"), ("asked", "asked"), ("counted", "counted")]
    columns += [("original_measured", "original, measured"), ("measured", "measured")]
    used = [(key, title) for key, title in columns if any(cost.get(key) is not None for cost in costs)]
    rows = [
        [_title(cost), *(_number(cost.get(key)) for key, _ in used), f"{cost['counted'] / cost['original']:.1%}"]
        for cost in costs
    ]
    return table(["", *(title for _, title in used), "left"], rows)


def _title(cost: Mapping[str, Any]) -> str:
    """Its label, and its unit where that says more."""
    label = cost.get("label") or cost["unit"]
    return label if label == cost["unit"] else f"{label}, {cost['unit']}"


def _accuracy_table(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return ""
    columns = [("top1", "top-1 %"), ("top5", "top-5 %"), ("original_top1", "unpruned top-1 %")]
    used = [(key, title) for key, title in columns if any(getattr(e, key) is not None for e in evaluations)]
    rows = [
        [f"{e.dataset} {e.split or ''}".strip(), f"{e.samples:,}"]
        + ["" if getattr(e, key) is None else f"{getattr(e, key):.2f}" for key, _ in used]
        for e in evaluations
    ]
    return table(["measured on", "images", *(title for _, title in used)], rows)


def _eval_results(e: Evaluation):
    from huggingface_hub import EvalResult

    for metric, value in (("accuracy", e.top1), ("top_5_accuracy", e.top5)):
        if value is not None:
            yield EvalResult(
                task_type="image-classification",
                dataset_type=e.dataset,
                dataset_name=e.dataset,
                dataset_split=e.split,
                metric_type=metric,
                metric_value=round(value / 100, 6),
            )


def _history(config: ChannelConfig, made: Mapping[str, Any]) -> str:
    lines = [
        f"- base architecture: {code(config.base)}"
        + (f" with {code(dict(config.base_args))}" if config.base_args else "")
    ]
    pruning = made.get("pruning") or {}
    if pruning.get("blocks"):
        lines.append("- residual blocks removed as a whole: " + ", ".join(code(name) for name in pruning["blocks"]))
    scores, options = pruning.get("scores") or {}, pruning.get("options") or {}
    if scores:
        lines.append("- channel scores: " + ", ".join(f"{text(key)} {code(value)}" for key, value in scores.items()))
    options = {key: value for key, value in options.items() if value not in ([], {})}
    if options:
        lines.append("- options: " + ", ".join(f"{text(key)} {code(value)}" for key, value in options.items()))
    if pruning.get("total_value"):
        value, bound = pruning["value"], pruning.get("upper_bound")
        certificate = "" if bound is None else f", upper bound {bound:.6g}"  # an infinite one is null in JSON
        lines.append(
            f"- importance kept: {value / pruning['total_value']:.2%}, solved as a knapsack "
            f"(value {value:.6g}{certificate})"
        )
    if made.get("versions"):
        installed = ", ".join(f"{text(name)} {text(version)}" for name, version in made["versions"].items())
        lines.append(f"- saved with {installed}")
    lines += [f"- {text(note)}" for note in made.get("notes", ())]
    return "\n".join(lines)


def layer_widths(config: ChannelConfig, base: nn.Module | None = None) -> list[tuple[str, int, int]]:
    """``(layer, original outputs, kept outputs)`` of every conv and linear of the base, in its order.

    Args:
        base: where it is not timm's.

    Example:
        >>> config = ChannelConfig("resnet18", {"layer1.0.conv1.weight": {0: 9}})
        >>> layer_widths(config)[:2]
        [('conv1', 64, 64), ('layer1.0.conv1', 64, 9)]
    """
    layers = []
    for name, module in (base_on_meta(config) if base is None else base).named_modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            out = 1 if getattr(module, "transposed", False) else 0
            size = module.weight.shape[out]
            kept = 0 if config.lacks(name) else config.widths.get(f"{name}.weight", {}).get(out, size)
            layers.append((name, size, kept))
    return layers


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def evaluations_to_json(values: Sequence[Evaluation | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain data for config.json; fields that were not measured are left out."""
    return [{k: v for k, v in asdict(Evaluation.read(value)).items() if v is not None} for value in values]
