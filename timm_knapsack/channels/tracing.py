"""One forward pass under a TorchDispatchMode: labels follow every ATen op.

The model runs as a copy on the meta device, where tensors have shapes but no values, so tracing costs neither memory
nor arithmetic. A model that asks for a value (``.item()``) is traced with real tensors instead.
"""

import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..slim.attributes import channel_numbers, feature_entries
from ..slim.copying import named_tensors
from .known_values import KnownValues
from .labels import Axis, Labels, Layout, size_of
from .live_maps import LiveMaps
from .meta_shapes import meta_result
from .op_rules import RULES, freeze_all, plain


@dataclass(frozen=True)
class Assumptions:
    """What a trace takes for granted; a verification that fails may ask for more.

    Attributes:
        bound_classes: modules of these classes read widths off their inputs or attributes: these sizes are tied.
        only_whole_heads: in such modules too, heads go whole or not at all; of their numbers those of the input count.
        fewest_heads: heads go one by one where there are at least so many; with two, half of a layer or nothing could
            go: there the widths within the heads shrink instead, where they may.
        narrower_heads: modules whose heads were turned (`slim.turned_heads`): there too, however many heads there are.
    """

    bound_classes: frozenset[str] = frozenset()
    only_whole_heads: bool = False
    fewest_heads: int = 3
    narrower_heads: frozenset[str] = frozenset()


class Trace(TorchDispatchMode):
    """Runs rules beside ops.

    Layouts are kept by the tensors' ids. Meta tensors cost nothing, so they are held to keep their ids unique; real
    ones are let go, and their layouts with them.
    """

    def __init__(self, model: nn.Module, assuming: Assumptions | None = None, follow_maps: bool = True):
        super().__init__()
        assuming = assuming or Assumptions()
        self.labels = Labels(
            only_whole_heads=assuming.only_whole_heads,
            fewest_heads=assuming.fewest_heads,
            narrower_heads=assuming.narrower_heads,
        )
        self.bound_classes = assuming.bound_classes
        self.on_meta = all(tensor.is_meta for _, tensor in named_tensors(model))
        self.outputs: list[Tensor] = []
        self.output_shapes: list[tuple[int, ...]] = []
        self.param_labels: dict[tuple[str, int], int] = {}  # (name, dim) → its first label
        self.reached: set[str] = set()
        self._layouts: dict[int, Layout] = {}
        self._held: dict[int, Tensor | weakref.ref] = {}
        self._names: dict[int, str] = {}
        self._known = KnownValues()
        self.follow_maps = follow_maps
        self.maps = LiveMaps(lambda tensor: (tensor.element_size(), self._layout(tensor).dims), hold=self.on_meta)
        for name, tensor in named_tensors(model):
            dims = []
            for d, size in enumerate(tensor.shape):
                self.param_labels[name, d] = self.labels.count
                dims.append(self.labels.new_dim(size))
                self.labels.count = self.param_labels[name, d] + size  # a dim of size 1 owns a label too
            self.set_layout(tensor, Layout(dims, weight=True))
            self._names[id(tensor)] = name
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._stack: list[tuple[str, dict]] = []
        self.labels.code_owner = self._code_owner

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
        return self._layout(tensor)

    def _layout(self, tensor: Tensor) -> Layout:
        layout = self._layouts.get(id(tensor))
        return plain(tensor.shape) if layout is None else layout

    def set_layout(self, tensor: Tensor, layout: Layout) -> None:
        key = id(tensor)
        self._layouts[key] = layout
        self._held[key] = tensor if self.on_meta else weakref.ref(tensor, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._layouts.pop(key, None)
        self._held.pop(key, None)

    # ---- the pass

    def computed(self, func, op: str, args, kwargs):
        """What an op gives."""
        return func(*args, **kwargs)

    def attention_scale(self, query: Tensor) -> float | None:
        """The scale of fused attention that is called without one; None leaves it to torch."""
        self.labels.freeze(self(query).dims[-1], "the width of a head sets the attention's scale")
        return None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, op = func._schema.name.split("::")
        if op == "_local_scalar_dense" and self.on_meta and (value := self._known.item(args[0])) is not None:
            return value
        result = meta_result(op, args, kwargs) if self.on_meta and namespace == "aten" else None
        if result is None:
            result = self.computed(func, op, args, kwargs)
        outputs = [y for y in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(y, Tensor)]
        if not outputs:
            return result
        if self.on_meta:
            self._known.note(func, args, kwargs, outputs)
        labels = self.labels
        labels.module, labels.bound = self._stack[-1] if self._stack else ("", {})
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
        if self.follow_maps:
            self.maps.follow(func, self.tensors(args, kwargs), outputs)
        return result

    @contextmanager
    def following_modules(self):
        """Keep track of which module is running, by its name."""

        def enter(module, inputs):
            name = self._modules.get(id(module), self._stack[-1][0] if self._stack else "")
            bound = self._bound_sizes(module, inputs) if type(module).__name__ in self.bound_classes else {}
            self._stack.append((name, bound))

        def leave(module, *_):
            self._stack.pop()

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave),
        ]
        try:
            yield
            self._stack.clear()
        finally:  # after an error the stack still ends with the module that raised it
            for hook in hooks:
                hook.remove()

    @property
    def running(self) -> str:
        """The module that is running, or that raised the error that ended the trace."""
        return self._stack[-1][0] if self._stack else ""

    def _code_owner(self) -> str:
        """The module whose method called the op; none where a function did."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
            if isinstance(owner, nn.Module):
                return self._modules.get(id(owner), "")
            frame = frame.f_back
        return ""

    def _bound_sizes(self, module: nn.Module, inputs) -> dict[int, tuple | None]:
        """Sizes a module's code may read off its inputs' channel dims, or off one attribute for several layers."""
        sizes = {} if self.labels.only_whole_heads else dict.fromkeys(channel_numbers(module))
        for tensor in self.tensors(inputs, {}):
            for dim in self(tensor).dims:
                if any(axis.labels is not None and not axis.uniform for axis in dim) and not sizes.get(size_of(dim)):
                    sizes[size_of(dim)] = dim
        return sizes


class _AttentionScale(TorchFunctionMode):
    """Fused attention without an explicit scale divides by the width of a head: its channels are not independent.

    On the meta device the fused op is taken apart before a dispatch mode sees it, so it is watched one level up.
    """

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and kwargs.get("scale") is None:
            kwargs = {**kwargs, "scale": self.trace.attention_scale(args[0] if args else kwargs["query"])}
        return func(*args, **kwargs)


@contextmanager
def _taken_apart():
    """Attention as single ops, which have rules, on every device: neither fused, nor by nn.MultiheadAttention's way
    for inference."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def run_trace(model: nn.Module, inputs: tuple, assuming: Assumptions | None = None, follow_maps: bool = True) -> Trace:
    """Run the model once; the trace holds all that was learnt."""
    return run_under(Trace(model, assuming, follow_maps), model, inputs)


def run_under(trace: Trace, model: nn.Module, inputs: tuple) -> Trace:
    """Run the model once under a trace that was made for it."""
    labels = trace.labels
    for x in inputs:
        if isinstance(x, Tensor):
            layout = plain(x.shape)
            if x.dim() >= 2 and x.shape[1] > 1:
                axis = Axis(x.shape[1], labels.new(x.shape[1]))
                layout.dims[1] = (axis,)
                labels.frozen.append((axis.labels, "the model's input"))
            trace.set_layout(x, layout)
    trace.maps.start(trace.tensors(inputs, {}))
    features = {}
    info = [*feature_entries(model)]
    wanted = {module for _, module, _ in info}
    handles = []
    for name, module in model.named_modules():
        if name in wanted:
            handles.append(module.register_forward_hook(lambda m, i, y, n=name: features.__setitem__((n, "out"), y)))
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, i, n=name: features.__setitem__((n, "in"), i[0]) if i else None
                )
            )
    inner = getattr(model, "forward_features", None)
    if callable(inner) and "forward_features" not in vars(model):

        def remember(*args, **kwargs):
            features["", "features"] = result = inner(*args, **kwargs)
            return result

        model.forward_features = remember
    try:
        with torch.no_grad(), _taken_apart(), trace.following_modules(), _AttentionScale(trace), trace:
            output = model(*inputs)
    except Exception as error:
        error.raised_in = trace.running
        raise
    finally:
        for handle in handles:
            handle.remove()
        vars(model).pop("forward_features", None)
    trace.outputs = trace.tensors((output,), {})
    trace.maps.finish(trace.outputs)
    for tensor in trace.outputs:
        trace.output_shapes.append(tuple(tensor.shape))
        for dim in trace(tensor).dims:
            for axis in dim:
                if axis.labels is not None:
                    labels.frozen.append((axis.labels, "the model's output"))
    _note_model_attributes(model, trace, info, features)
    return trace


def _note_model_attributes(model: nn.Module, trace: Trace, info, features) -> None:
    """timm's numbers about the whole model: num_features, head_hidden_size, feature_info."""
    labels = trace.labels
    labels.module = ""

    def channels(tensor, size):
        if isinstance(tensor, (tuple, list)):
            tensor = tensor[-1] if tensor else None
        if not isinstance(tensor, Tensor):
            return None
        dims = trace(tensor).dims
        order = [1, -1, *range(len(dims))] if len(dims) == 4 else [-1, 1, *range(len(dims))]
        fitting = [dims[d] for d in order if -len(dims) <= d < len(dims) and tensor.shape[d] == size]
        return next((dim for dim in fitting if any(axis.labels is not None for axis in dim)), None)

    entries = getattr(model.feature_info, "info", model.feature_info) if info else []
    for i, module, side in info:
        dim = channels(features.get((module, side)), entries[i]["num_chs"])
        if dim is not None:
            labels.use(entries[i]["num_chs"], dim, f"feature_info.{i}.num_chs")
    for name in ("num_features", "embed_dim"):
        size = vars(model).get(name)
        dim = channels(features.get(("", "features")), size) if type(size) is int else None
        if dim is not None:
            labels.use(size, dim, name)
    hidden = vars(model).get("head_hidden_size")
    classifier = getattr(model, "get_classifier", lambda: None)()
    if isinstance(classifier, (nn.Linear, nn.Conv2d)) and type(hidden) is int and classifier.weight.shape[1] == hidden:
        labels.use(hidden, trace(classifier.weight).dims[1], "head_hidden_size")
