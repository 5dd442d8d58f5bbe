"""One forward pass under a TorchDispatchMode: labels follow every ATen op.

The model runs as a copy on the meta device, where tensors have shapes but no values, so tracing costs neither memory
nor arithmetic. A model that asks for a value (``.item()``) is traced with real tensors instead.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from . import shape_rules  # noqa: F401  (fills the table)
from .channel_rules import RULES, freeze_all, plain
from .errors import TraceError
from .labels import Labels, Layout, size_of


class Trace(TorchDispatchMode):
    """Runs rules beside ops. Holds every tensor it has seen, so that ids stay unique."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.labels = Labels()
        self.param_labels: dict[tuple[str, int], int] = {}  # (name, dim) → its first label
        self.reached: set[str] = set()
        self._layouts: dict[int, Layout] = {}
        self._held: list[Tensor] = []
        self._names: dict[int, str] = {}
        for name, tensor in named_tensors(model):
            dims = []
            for d, size in enumerate(tensor.shape):
                self.param_labels[name, d] = self.labels.count
                dims.append(self.labels.new_dim(size))
                self.labels.count = self.param_labels[name, d] + size  # a dim of size 1 owns a label too
            self.set_layout(tensor, Layout(dims, weight=True))
            self._names[id(tensor)] = name
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []

    # ---- what rules ask for

    @staticmethod
    def is_tensor(x) -> bool:
        return isinstance(x, Tensor)

    @staticmethod
    def tensors(args, kwargs) -> list[Tensor]:
        return [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]

    def __call__(self, tensor: Tensor) -> Layout:
        if id(tensor) in self._names:
            self.reached.add(self._names[id(tensor)])
        layout = self._layouts.get(id(tensor))
        return plain(tensor.shape) if layout is None else layout

    def set_layout(self, tensor: Tensor, layout: Layout) -> None:
        self._layouts[id(tensor)] = layout
        self._held.append(tensor)

    # ---- the pass

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [y for y in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(y, Tensor)]
        if not outputs:
            return result
        labels = self.labels
        namespace, op = func._schema.name.split("::")
        labels.module = self._stack[-1] if self._stack else ""
        labels.place = f"{namespace}.{op} in {labels.module or 'the model itself'}"
        rule = RULES.get(func._schema.name)
        if rule is None:
            freeze_all(labels, self, args, kwargs, f"no rule for the op {namespace}.{op}")
            layouts = [plain(y.shape) for y in outputs]
        else:
            layouts = rule(labels, op, self, args, kwargs, outputs)
            layouts = [layouts] if isinstance(layouts, Layout) else list(layouts)
        for tensor, layout in zip(outputs, layouts, strict=True):
            if [size_of(dim) for dim in layout.dims] != list(tensor.shape):
                freeze_all(labels, self, args, kwargs, f"the rule for {namespace}.{op} does not give the op's shape")
                layout = plain(tensor.shape)
            self.set_layout(tensor, layout)
        return result

    @contextmanager
    def following_modules(self):
        """Keep track of which module is running, by its name."""

        def enter(module, _):
            self._stack.append(self._modules.get(id(module), self._stack[-1] if self._stack else ""))

        def leave(module, *_):
            self._stack.pop()

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each tensor once under its first name."""
    seen, result = set(), []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            result.append((name, tensor))
    return result


def copy_with(model: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A deep copy in which each parameter and buffer is what ``replace(name, tensor)`` returns; hooks stay behind."""
    memo = {}
    for name, tensor in named_tensors(model):
        new = replace(name, tensor)
        if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    for module in model.modules():  # plain tensor attributes go where the parameters go
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = replace(name, value)
    result = copy.deepcopy(model, memo)
    for module in result.modules():
        for hooks in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"):
            getattr(module, hooks, {}).clear()
        pre = module._forward_pre_hooks
        for key in [k for k, hook in pre.items() if not type(hook).__module__.startswith("torch.nn.utils")]:
            del pre[key]  # weight_norm and spectral_norm are hooks that belong to the layer: they stay
    return result


def on_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device, in eval mode."""
    return copy_with(model, lambda _, tensor: torch.empty_like(tensor, device="meta")).eval()


def example_input(model: nn.Module, input_size=None, batch_size: int = 1) -> tuple[int, ...]:
    """The shape to run a model with: as asked, or as its timm config says."""
    if input_size is None:
        config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
        input_size = config.get("input_size") if isinstance(config, Mapping) else getattr(config, "input_size", None)
        # An image size given to create_model wins over the config's.
        grid = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if input_size is not None and grid is not None and tuple(grid) != tuple(input_size[1:]):
            input_size = (input_size[0], *grid)
    if input_size is None:
        raise TraceError(
            f"{type(model).__name__} does not say its input size; pass example_inputs=torch.zeros(1, 3, 224, 224) "
            "(or input_size=(3, 224, 224)) with the size it expects"
        )
    size = tuple(int(n) for n in input_size)
    channels = first_conv_channels(model)
    if channels is not None and size[0] != channels:
        size = (channels, *size[1:])
    return (batch_size, *size)


def first_conv_channels(model: nn.Module) -> int | None:
    """Input channels of a timm model's first conv, for models created with another ``in_chans``."""
    config = getattr(model, "pretrained_cfg", None)
    name = config.get("first_conv") if isinstance(config, Mapping) else None
    if not name:
        return None
    name = name if isinstance(name, str) else name[0]
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return getattr(layer, "in_channels", None) if isinstance(layer, nn.Conv2d) else None


def inputs_like(example_inputs, device) -> tuple:
    """Positional inputs on a device; floating tensors only."""
    inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    return tuple(torch.empty_like(x, device=device) if isinstance(x, Tensor) and device == "meta" else x for x in inputs)


def record_outputs(model: nn.Module, names: set[str]) -> tuple[dict[str, Tensor], list]:
    """Hooks that remember what the named modules return."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name in names:
            handles.append(module.register_forward_hook(lambda m, i, y, name=name: outputs.__setitem__(name, y)))
    return outputs, handles


def takes_one_input(model: nn.Module) -> bool:
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1
