"""Where a network comes from: a timm name, a saved folder or the Hub, with weights from the Hub, a file, or none."""

import difflib
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models._hub import download_from_hf
from torch import Tensor, nn

from ..errors import CheckpointError, KnapsackError, first_line
from ..files.paths import check_readable, check_readable_files, named_path
from .foreign_config import read_saved_config

_NOT_BASE_ARGS = ("num_classes", "in_chans")  # the model itself says these


@dataclass(frozen=True)
class ModelSource:
    """How to make a network again; plain data, so that it can be written down.

    Attributes:
        name: a timm model, a folder written by `save_pretrained`, or ``hf-hub:…``.
        pretrained: load timm's weights; a folder always brings its own.
        weights: a .safetensors (or .pth) file instead.
        args: further arguments of ``timm.create_model``, such as ``{"num_classes": 100}``.

    Example:
        >>> ModelSource("resnet18", pretrained=False).load().num_features
        512
    """

    name: str
    pretrained: bool = True
    weights: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise KnapsackError(f"a model is a timm name or a folder, not {self.name!r}")
        path = named_path(self.name, home=True)
        if path.is_dir() and not self.name.startswith(("local-dir:", "hf-hub:")):
            object.__setattr__(self, "name", f"local-dir:{saved_folder(path).resolve()}")
        if self.weights is not None:
            object.__setattr__(self, "weights", str(named_path(self.weights, CheckpointError, home=True).resolve()))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "args": dict(self.args)}

    @property
    def is_folder(self) -> bool:
        return self.name.startswith(("local-dir:", "hf-hub:"))

    @property
    def base_args(self) -> dict[str, Any]:
        """Arguments that a ChannelConfig must remember."""
        return {key: value for key, value in self.args.items() if key not in _NOT_BASE_ARGS}

    def load(self) -> nn.Module:
        """The network with its weights, on the CPU, in ``eval()`` mode."""
        self.check()
        wanted = (self.pretrained or self.is_folder) and self.weights is None
        if wanted and not self.is_folder:
            cfg = timm.get_pretrained_cfg(self.name)
            if cfg is None or not cfg.has_weights:
                raise KnapsackError(
                    f"timm has no weights for {self.name!r}; give yours with weights='FILE.safetensors', or take "
                    "random ones with pretrained=False"
                )
        if wanted and not self.name.startswith("local-dir:"):
            prefer_cache_when_offline()
        try:
            if self.is_folder:
                read_saved_config(self._config_file())
            model = timm.create_model(self.name, pretrained=wanted, **self.args)
        except KnapsackError:
            raise
        except OSError as error:
            raise KnapsackError(f"the weights of {self.name} can't be had: {_why(error)}") from error
        except (SafetensorError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"the weights of {self.name} are damaged ({first_line(error)}): write or download them again"
            ) from error
        except Exception as error:  # a folder may hold anything, and timm raises whatever comes of it
            if isinstance(error, (TypeError, AssertionError)):
                raise KnapsackError(f"{self.name} can't be built with {dict(self.args)}: {error}") from error
            if not self.is_folder and not isinstance(error, RuntimeError):
                raise
            raise KnapsackError(f"{self.name} can't be loaded: {first_line(error)}") from error
        if self.weights is not None:
            load_weights(model, self.weights)
        return model.eval()

    def _config_file(self) -> str:
        source, place = self.name.split(":", 1)
        return download_from_hf(place, "config.json") if source == "hf-hub" else os.path.join(place, "config.json")

    def on_meta(self) -> nn.Module:
        """The architecture without memory for its weights."""
        self.check()
        if self.is_folder:
            return self.load().to("meta")
        try:
            with torch.device("meta"):
                return timm.create_model(self.name, **self.args).eval()
        except (TypeError, AssertionError) as error:
            raise KnapsackError(f"{self.name} can't be built with {dict(self.args)}: {error}") from error

    def check(self) -> None:
        """An error if there is no such model, with the nearest names."""
        if self.name.startswith("local-dir:"):
            folder = named_path(self.name.removeprefix("local-dir:"))
            if not (folder / "config.json").is_file():
                raise KnapsackError(
                    f"{folder} holds no saved model (no config.json); `timm-knapsack prune` and tk.save_pretrained "
                    "write one"
                )
            check_readable_files(folder)
            return
        if self.name.startswith("hf-hub:") or timm.is_model(self.name):
            return
        bare = self.name.partition(".")[0].lower()
        near = difflib.get_close_matches(bare, timm.list_models(), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else "`timm.list_models()` names them all"
        raise KnapsackError(f"timm has no model {self.name!r}, and there is no such folder; {hint}")


def saved_folder(folder: str | os.PathLike) -> Path:
    """The folder of the saved model: this one, or its ``model``, which finetune, run and quickstart write.

    Example:
        >>> saved_folder("resnet18-half").name
        'resnet18-half'
    """
    folder = named_path(folder, home=True)
    inner = folder / "model"
    return inner if not (folder / "config.json").is_file() and (inner / "config.json").is_file() else folder


def load_weights(model: nn.Module, path: str | os.PathLike) -> None:
    """Load a state dict from a .safetensors or .pth file into a model, strictly; wrapped ones are unwrapped.

    Example:
        >>> torch.save(model.state_dict(), "weights.pth")
        >>> load_weights(model, "weights.pth")
    """
    path = named_path(path, CheckpointError)
    check_readable(path, CheckpointError)
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no weights file {path}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder; name the file of weights in it") from None
    except Exception as error:  # pickle, zip, safetensors and OS errors all mean the same to the user
        raise CheckpointError(
            f"{path} can't be read as weights ({first_line(error)}): it is damaged, or no file that torch.save or "
            "safetensors wrote; write or download it again"
        ) from error
    for key in ("state_dict_ema", "state_dict", "model_ema", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} holds no weights: expected {{name: tensor}}, as state_dict() gives it")
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    own = model.state_dict()
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    wrong = [n for n in own if n in state and own[n].shape != state[n].shape]
    if missing or unknown or wrong:
        if wrong:
            first = wrong[0]
            what = f"{first} is {tuple(state[first].shape)} in the file and {tuple(own[first].shape)} in the model"
            if own[first].shape[1:] == state[first].shape[1:] and first == [n for n in own if own[n].dim() > 1][-1]:
                what += f"; num_classes={state[first].shape[0]} makes the classifier fit"
        else:
            what = f"the file lacks {missing[0]}" if missing else f"the model has no {unknown[0]}"
        raise CheckpointError(f"{path} does not fit this model: {what}")
    model.load_state_dict(state, strict=False)


def prefer_cache_when_offline() -> None:
    """Without a network the Hub client retries for a minute before it looks into its cache: set it offline at once."""
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return  # the proxy resolves names, not we
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _why(error: OSError) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such repository on the Hub, or it is private; check the name, or log in with `hf auth login`"
        )
    if constants.HF_HUB_OFFLINE or type(error).__module__.startswith(("huggingface_hub", "httpx", "requests")):
        return (
            "the Hub can't be reached and they are not in its cache; give a file with weights='FILE.safetensors', or "
            "take random weights with pretrained=False"
        )
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
