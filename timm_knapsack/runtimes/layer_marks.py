"""Marks in the names of an ONNX graph, by which a runtime's own profile can be read layer by layer.

Runtimes fuse nodes and give them new names, made of the old names of nodes (OpenVINO) or of the values they make (ONNX
Runtime). So both carry the layers that they come from, as ``⟨layer1.0.conv1⟩``.
"""

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

_MARK = re.compile(r"⟨([^⟩]*)⟩")


def mark_layers(proto: Any, module: nn.Module) -> Any:
    """Rename nodes and values of a graph that `to_onnx` made of the module; returns the same graph.

    A node with a weight is marked with its layer; any other, and every value, with the layers whose output it is,
    through activations and sums: a conv that has swallowed what is behind it may be known by that only.

    Example:
        >>> from timm_knapsack.runtimes.onnx_graph import to_onnx
        >>> graph = mark_layers(to_onnx(model, torch.zeros(2, 3, 32, 32)), model).graph
        >>> [(node.op_type, marks(node.name)) for node in graph.node[:3]]
        [('Conv', ['conv1']), ('Relu', ['conv1']), ('Conv', ['layer1.0.conv1'])]
    """
    modules = {name for name, _ in module.named_modules()}
    constants = {tensor.name for tensor in proto.graph.initializer}
    sources: dict[str, list[str]] = {}  # of a value, the layers whose output it is
    sums: set[str] = set()  # values that join several others
    renamed: dict[str, str] = {}
    for number, node in enumerate(proto.graph.node):
        layer = _owner(node, modules)
        taken = [name for name in node.input if name and name not in constants]
        joins = layer is None and len(set(taken)) > 1
        if layer is None:
            direct = [name for name in taken if name not in sums] if joins else taken
            found = list(dict.fromkeys(one for name in direct or taken for one in sources.get(name, ())))
        else:
            found = [layer]
        node.name = f"{''.join(f'⟨{one}⟩' for one in found)}{number}"
        for place, name in enumerate(node.output):
            sources[name] = found
            if joins or (layer is None and any(one in sums for one in taken)):
                sums.add(name)
            renamed[name] = f"{node.name}.{place}" if name else ""
    for node in proto.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (*proto.graph.output, *proto.graph.value_info):
        value.name = renamed.get(value.name, value.name)
    return proto


def _owner(node: Any, modules: set[str]) -> str | None:
    """The module whose weight a node takes: a conv with a norm folded into it comes from the norm, by its scope."""
    if node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    owner, dot, _ = (node.input[1] if len(node.input) > 1 else "").rpartition(".")
    if dot and owner in modules:
        return owner
    scopes = next((p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), "[]")
    return next((scope for scope in reversed(ast.literal_eval(scopes)) if scope in modules), None)


def marks(name: str) -> list[str]:
    """The layers in a name, whatever a runtime has made of it.

    Example:
        >>> marks("fused ⟨layer1.0.conv1⟩12_nchwc"), marks("reorder")
        (['layer1.0.conv1'], [])
    """
    return _MARK.findall(name)


def by_layer(nodes: Iterable[tuple[Sequence[str], float]], layers: Iterable[str]) -> dict[str, float]:
    """Seconds of each layer with what runs after it, up to the next one; ``""`` is what runs before the first.

    Args:
        nodes: in the order in which they ran, the names by which each may be known, and its seconds. Of several layers
            in its names, a node is the first that has not run yet: one that sums the outputs of two layers runs after
            the other one. Where all have run, it follows the last.

    Example:
        >>> by_layer([([], 1.0), (["⟨conv1⟩0"], 4.0), ([], 2.0), (["⟨conv1⟩⟨conv2⟩"], 8.0)], ["conv1", "conv2"])
        {'': 1.0, 'conv1': 6.0, 'conv2': 8.0}
    """
    known, now = set(layers), ""
    times = {"": 0.0}
    for names, seconds in nodes:
        found = [layer for name in names for layer in marks(name) if layer in known]
        if now not in found:
            now = found[0] if found else now
        now = next((layer for layer in found if layer not in times), now)
        times[now] = times.get(now, 0.0) + seconds
    return times
