"""Saving a pruned model as a folder that plain ``timm.create_model`` reads, and publishing it on the Hugging Face Hub.

The folder holds ``model.safetensors`` (never a pickle), ``config.json`` as timm reads it, ``channels.json`` (the
ChannelConfig), ``README.md`` (the model card) and, if there is one, ``kept_channels.png``.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, HubError, KnapsackError
from ..files.atomic import replacing_file, replacing_folder, write_text
from ..files.paths import named_path
from ..files.plain_json import parse_json, plain, read_limited, write_json
from ..files.versions import versions
from ..models.builders import Builder, build_base, builder_name
from ..models.foreign_config import check_base
from ..models.pruned_models import GENERIC
from ..models.rebuild import base_on_meta, mismatches, model_args_of, resized
from ..slim.channel_config import MAX_BYTES, ChannelConfig
from ..slim.cutting import resize_model
from ..slim.tensor_files import separate, write_tensors
from .model_card import PICTURE, Evaluation, counted_costs, evaluations_to_json, layer_widths, model_card
from .publication import Publication, publish
from .verification import example_for, verify_saved

WEIGHTS, CONFIG, CHANNELS, CARD = "model.safetensors", "config.json", "channels.json", "README.md"
FILES = (WEIGHTS, CONFIG, CHANNELS, CARD, PICTURE)

_INSIDE = ("_orig_mod", "module", "timm_model")  # torch.compile, DataParallel and ModelEma, transformers' TimmWrapper

# Fields of the base's pretrained config that speak of the base's weights, not of these.
_OF_THE_BASE = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag")
_OF_THE_BASE += ("custom_load", "label_offset", "description", "origin_url", "paper_name", "paper_ids", "notes")


def save_pretrained(
    result_or_model: Any,
    folder: str | os.PathLike,
    *,
    report: Any = None,
    evaluation: Evaluation | Mapping[str, Any] | Sequence[Evaluation | Mapping[str, Any]] = (),
    datasets: Sequence[str] = (),
    base_model: str | bool | None = None,
    license: str | None = None,
    notes: Sequence[str] = (),
    picture: str | os.PathLike | Callable[[Path], Any] | None = None,
    builder: Builder | None = None,
    example_inputs: Any = None,
    verify: bool = True,
) -> Path:
    """Write a pruned model as a folder for ``timm.create_model("local-dir:<folder>", pretrained=True)``.

    What is loaded from it is what was saved, bit for bit; ``verify`` loads it and compares before the folder is put in
    place. A folder of an earlier save is replaced as a whole: a crash leaves the old one. A model that was not pruned
    here has no channel config and is refused: ``timm.models.save_for_hf`` writes those.

    Args:
        result_or_model: a `PruneResult`, or a pruned model: fine-tuned, deep-copied, compiled or wrapped for training,
            it still knows its channel config. Of a wrapper the network inside is saved.
        report: the `PruneReport` to take asked and counted costs from, where a model is given; without it MACs and
            parameters are counted.
        evaluation: accuracies that were measured, for the card.
        datasets: Hub ids of the data it was scored, tuned and evaluated with, for the card.
        base_model: Hub id of the weights it was pruned from, such as ``"timm/resnet50.a1_in1k"``; True for those that
            timm names for the base. A model does not remember where its weights came from, so nothing is claimed
            unless it is said here.
        license: of the weights; by default the base's.
        notes: lines for the card's "How it was made".
        picture: the kept-channels picture, or a function that draws it into a given path.
        builder: of a network that is not timm's: the function that makes the unpruned one, or its name,
            ``"package.module:function"``; `load_pretrained` wants it named again.
        example_inputs: what the network can be called with, for ``verify``; by default an image of its own size.
        verify: load what was written and compare outputs on one image.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> save_pretrained(result, "net-half").name
        'net-half'
        >>> smaller = timm.create_model("local-dir:net-half", pretrained=True)
    """
    model, config, report = _unpack(result_or_model, report)
    if builder is not None:
        config = replace(config, builder=builder_name(builder))
    folder = named_path(folder, HubError).resolve()
    _check_target(folder)
    state = model.state_dict()
    for name, tensor in state.items():
        if tensor.is_meta:
            raise HubError(f"{name} is on the meta device: this model has no weights to save")
    state = separate(state)
    base, args = _check_rebuilds(model, config, state, builder)
    single = isinstance(evaluation, (Evaluation, Mapping))
    made = {
        "base_model": _base_weights(model) if base_model is True else base_model,
        "costs": _costs(report) or counted_costs(config, model, base),
        "layers": layer_widths(config, base) if base is not None else [],
        "input_size": list(report.input_size) if base is not None and report is not None else [],
        "pruning": _pruning(report),
        "evaluation": evaluations_to_json([evaluation] if single else evaluation),
        "datasets": list(datasets),
        "license": license,
        "notes": list(notes),
        "versions": versions("timm-knapsack", "timm", "torch"),
    }
    made = plain({key: value for key, value in made.items() if value})
    try:
        with replacing_folder(folder) as new:
            _write_files(new, state, _config_json(model, config, args, made), config, picture)
            write_text(new / CARD, str(model_card(new, name=folder.name)))
            if verify:
                verify_saved(model, state, new, builder or config.builder, example_for(model, report, example_inputs))
    except OSError as error:
        raise HubError(f"can't write {folder}: {error.strerror or error}; what stood there before is whole") from error
    return folder


def push_to_hub(
    folder_or_result: Any,
    repo_id: str,
    private: bool = False,
    token: str | None = None,
    *,
    revision: str | None = None,
    tag: str | None = None,
    commit_message: str | None = None,
    dry_run: bool = False,
    **saving,
) -> Publication:
    """Publish a saved folder, a `PruneResult` or a pruned model on the Hub, in one commit.

    Args:
        repo_id: such as ``"me/resnet50-half"``; created if it is not there.
        token: by default the one that ``hf auth login`` stored, or ``HF_TOKEN``.
        revision: branch to commit to, created if needed; ``main`` by default.
        tag: also give the commit this tag, for ``timm.create_model("hf-hub:me/resnet50-half@v1", pretrained=True)``.
        dry_run: send nothing, return what would be sent.
        saving: passed to `save_pretrained` where a result or model is given.

    Example:
        >>> print(push_to_hub("resnet20-half", "me/resnet20-half", dry_run=True))
        would publish to me/resnet20-half, branch main:
        ... bytes  model.safetensors
        ...
        >>> push_to_hub("resnet20-half", "me/resnet20-half", private=True)  # doctest: +SKIP
    """
    if not isinstance(folder_or_result, (str, os.PathLike)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = save_pretrained(folder_or_result, Path(temporary) / repo_id.rpartition("/")[2], **saving)
            return push_to_hub(
                folder,
                repo_id,
                private,
                token,
                revision=revision,
                tag=tag,
                commit_message=commit_message,
                dry_run=dry_run,
            )
    if saving:
        raise HubError(f"{sorted(saving)[0]!r} describes how a model is saved; this folder is saved already")
    folder = named_path(folder_or_result, HubError)
    _check_saved(folder)
    own_card = (folder / CARD).read_text(encoding="utf-8")
    edited = own_card != str(model_card(folder))

    def card(final_repo_id: str) -> str:
        return own_card if edited else str(model_card(folder, final_repo_id))

    return publish(
        repo_id,
        {name: folder / name for name in FILES if (folder / name).is_file() and name != CARD},
        {CARD: card},
        optional=(PICTURE,),
        private=private,
        token=token,
        revision=revision,
        tag=tag,
        commit_message=commit_message or f"Publish a pruned {ChannelConfig.load(folder / CHANNELS).base}",
        dry_run=dry_run,
    )


# ---- what is saved ----------------------------------------------------------------------------------------------


def _unpack(result_or_model: Any, report: Any) -> tuple[nn.Module, ChannelConfig, Any]:
    model = getattr(result_or_model, "model", None)
    if isinstance(result_or_model, nn.Module):
        model = result_or_model
    elif isinstance(model, nn.Module):
        report = report or getattr(result_or_model, "report", None)
    else:
        raise HubError(f"expected a PruneResult or a pruned model, got {type(result_or_model).__name__}")
    while "channel_config" not in vars(model):
        inner = next((model._modules[name] for name in _INSIDE if name in model._modules), None)
        if not isinstance(inner, nn.Module):
            raise HubError(
                f"this {type(model).__name__} was not pruned by timm_knapsack: it has no channel_config. An ordinary "
                "timm model is saved by timm.models.save_for_hf(model, folder, safe_serialization=True)"
            )
        model = inner
    config = model.channel_config
    if not isinstance(config, ChannelConfig):
        raise HubError(f"channel_config is a {type(config).__name__}, expected a ChannelConfig")
    return model, config, report


def _check_rebuilds(
    model: nn.Module, config: ChannelConfig, state: Mapping[str, Tensor], builder: Builder | None
) -> tuple[nn.Module | None, dict[str, int]]:
    """The base model, resized by the config, must have exactly this model's shapes."""
    if config.builder is not None:
        base = build_base(builder or config.builder, config)
        wrong = mismatches(state, resize_model(base, config))
        if wrong:
            raise CheckpointError(
                f"what {config.builder} builds, cut by this model's channel config, is not this model: "
                f"{'; '.join(wrong[:3])}. Arguments that it was called with belong into prune(…, base_args={{…}})"
            )
        return base, {}
    try:
        check_base(config.base)
    except KnapsackError as error:
        raise HubError(
            f"{error}. Say how the unpruned network is made: save_pretrained(…, builder='package.module:function'); "
            "or register it with timm.models.register_model before it is pruned"
        ) from None
    args = model_args_of(model)
    rebuilt = resized(base_on_meta(config, {**config.base_args, **args}), config)
    wrong = mismatches(state, rebuilt)
    if wrong:
        raise CheckpointError(
            f"{config.base} and this model's channel config do not give this model: {'; '.join(wrong[:3])}. If the "
            "base was created with arguments such as depth, say so: prune(…, base_args={'depth': 8})"
        )
    return None, args


def _config_json(model: nn.Module, config: ChannelConfig, args: Mapping[str, int], made: dict) -> dict[str, Any]:
    cfg = {k: v for k, v in dict(getattr(model, "pretrained_cfg", None) or {}).items() if k not in _OF_THE_BASE}
    size = list(cfg.get("input_size") or (3, 224, 224))
    img_size = config.base_args.get("img_size")
    if img_size is not None:
        size[1:] = img_size if isinstance(img_size, tuple) else (img_size, img_size)
    size[0] = args.get("in_chans", size[0])
    for key in ("test_input_size", "min_input_size"):
        if cfg.get(key):
            cfg[key] = [size[0], *cfg[key][1:]]
    classes = 0 if config.features or config.builder else args.get("num_classes", cfg.get("num_classes", 1000))
    return {
        "architecture": GENERIC,
        "num_classes": classes,
        "num_features": getattr(model, "num_features", None),
        "model_args": {"channels": config.to_dict()},
        "pretrained_cfg": {**cfg, "input_size": size, "num_classes": classes},
        "timm_knapsack": made,
    }


def _write_files(new: Path, state, config_json: dict, config: ChannelConfig, picture) -> None:
    write_tensors(new / WEIGHTS, state)
    write_json(new / CONFIG, config_json, exact=True, indent=2, sort_keys=True)
    config.save(new / CHANNELS)
    if callable(picture):
        picture(new / PICTURE)
    elif picture is not None:
        with replacing_file(new / PICTURE) as file:
            shutil.copyfile(picture, file)


# ---- the folder -------------------------------------------------------------------------------------------------


def _check_target(folder: Path) -> None:
    """An earlier save may be replaced, an empty folder filled; other files are never overwritten."""
    if folder == Path.cwd():
        raise HubError("the current folder can't be replaced as a whole; save into a folder below it")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise HubError(f"{folder} is a file, expected a folder")
    if not _is_ours(folder):
        raise HubError(f"{folder} holds files that save_pretrained did not write; choose a new or an empty folder")


def _is_ours(folder: Path) -> bool:
    try:
        return "timm_knapsack" in parse_json(read_limited(folder / CONFIG, MAX_BYTES), CONFIG)
    except (KnapsackError, TypeError):  # no file, no JSON, or a number
        return False


def _check_saved(folder: Path) -> None:
    if not folder.is_dir():
        raise HubError(f"there is no folder {folder}; `timm-knapsack prune` and tk.save_pretrained write one")
    missing = [name for name in (WEIGHTS, CONFIG, CHANNELS, CARD) if not (folder / name).is_file()]
    if missing or not _is_ours(folder):
        raise HubError(
            f"{folder} was not written by save_pretrained: {missing[0] if missing else CONFIG} is missing or foreign"
        )


# ---- provenance -------------------------------------------------------------------------------------------------


def _base_weights(model: nn.Module) -> str | None:
    return (getattr(model, "pretrained_cfg", None) or {}).get("hf_hub_id")


def _costs(report: Any) -> list[dict[str, Any]]:
    if report is None:
        return []
    return [{k: v for k, v in cost.items() if v is not None} for cost in report.to_dict()["costs"]]


def _pruning(report: Any) -> dict[str, Any]:
    if report is None:
        return {}
    data = report.to_dict()
    return {
        k: data[k]
        for k in ("model", "value", "total_value", "upper_bound", "rounds", "scores", "options", "blocks")
        if k in data and (k != "blocks" or data[k])
    }
