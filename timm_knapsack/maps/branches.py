"""Which residual branches of a network can go as a whole, found out by trial, not by the names of classes.

A block is made of **parts**: its children, in the order in which they run. A part that returns zeros ends a branch if
the block then returns its input, bit for bit: ``bn2`` of a ResNet's block (the activation behind the sum changes
nothing, as the block's input has been through one already). Such a block has one branch, and becomes an identity.
Where no single part does that, two or three together may: ``drop_path1`` and ``drop_path2`` of a transformer's block,
say. Then it has as many branches, and each can go alone: the part that ends it returns a zero, and parts that nothing
else listens to (``norm1``, ``attn``, ``ls1``) become identities. Blocks that change the shape of what they get have no
such parts.

The branches are then tried in the whole network, on an image and on noise: removed must be equal to zeroed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import first_line
from ..slim.channel_config import IDENTITY, ZERO
from ..slim.modes import eval_mode
from ..slim.removed_blocks import without_modules
from .taps import find_blocks

MOST_BRANCHES = 3  # of one block


@dataclass(frozen=True)
class Branch:
    """A residual branch that can be removed.

    Attributes:
        name: of the block, or of the largest part of the branch where the block has several.
        block: that it belongs to.
        removed: ``{module: "identity" or "zero"}``, what `without_modules` puts in their place.
        layers: convs, linears and norms that go with it.
        alone: whether the block has no other branch.

    Example:
        >>> Branch("layer1.1", "layer1.1", {"layer1.1": "identity"}, ("layer1.1.conv1",)).alone
        True
    """

    name: str
    block: str
    removed: Mapping[str, str]
    layers: tuple[str, ...]
    alone: bool = True


def find_branches(model: nn.Module, images: Tensor) -> tuple[list[Branch], dict[str, str]]:
    """The branches that can be removed, in the order of the network, and ``{block: why not}`` of the other blocks.

    Args:
        images: a batch that the model can be called with; the first is used, and noise like it.

    Example:
        >>> import timm_knapsack, timm
        >>> branches, refused = find_branches(timm.create_model("resnet18"), torch.randn(2, 3, 64, 64))
        >>> [branch.name for branch in branches]
        ['layer1.0', 'layer1.1', 'layer2.1', 'layer3.1', 'layer4.1']
        >>> refused["layer2.0"]
        'its output has another shape than its input'
    """
    with eval_mode(model), torch.no_grad():
        return _Search(model, images).run()


def removed_by(branches: Sequence[Branch], among: Sequence[Branch]) -> dict[str, str]:
    """What `without_modules` needs to remove several branches; a block that loses all of its own is gone as a whole.

    Args:
        among: all branches of the network.

    Example:
        >>> attn = Branch("b.attn", "b", {"b.attn": "zero"}, (), alone=False)
        >>> mlp = Branch("b.mlp", "b", {"b.mlp": "zero"}, (), alone=False)
        >>> removed_by([attn], [attn, mlp]), removed_by([mlp, attn], [attn, mlp])
        ({'b.attn': 'zero'}, {'b': 'identity'})
    """
    chosen = {branch.name for branch in branches}
    removed: dict[str, str] = {}
    for branch in branches:
        whole = all(other.name in chosen for other in among if other.block == branch.block)
        removed |= {branch.block: IDENTITY} if whole else branch.removed
    return removed


class _Refused(Exception):
    """Why a block has no branch that can go."""


class _Search:
    def __init__(self, model: nn.Module, images: Tensor):
        self.model = model
        self.modules = dict(model.named_modules())
        images = images[:1]
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images)
        self.images = torch.cat([images, noise * images.std() + images.mean()])
        self.calls: dict[str, list[tuple[Any, Any, Any]]] = {}

    def run(self) -> tuple[list[Branch], dict[str, str]]:
        blocks = find_blocks(self.model)
        self._watch(blocks)
        found: dict[str, dict[str, Branch]] = {}  # {block: {the part that ends a branch: the branch}}
        refused: dict[str, str] = {}
        for block in blocks:
            try:
                found[block] = self._branches_of(block)
            except _Refused as why:
                refused[block] = str(why)
        if self._difference({end: branch for each in found.values() for end, branch in each.items()}):
            for block, branches in list(found.items()):  # not all of them at once: one by one
                why = next(filter(None, (self._difference({e: b}) for e, b in branches.items())), "")
                if why:
                    refused[block] = why
                    del found[block]
        order = [block for block in self.calls if block in found]  # as they run
        return [branch for block in order for branch in found[block].values()], refused

    def _watch(self, blocks: Sequence[str]) -> None:
        """Inputs and output of every block, in one pass."""
        handles, entered = [], {}

        def enter(name):
            def hook(module, args, kwargs):
                entered[name] = _copied((args, kwargs))

            return hook

        def leave(name):
            def hook(module, args, output):
                self.calls.setdefault(name, []).append((*entered[name], _copied(output)))

            return hook

        try:
            for name in blocks:
                handles.append(self.modules[name].register_forward_pre_hook(enter(name), with_kwargs=True))
                handles.append(self.modules[name].register_forward_hook(leave(name)))
            self.output = self.model(self.images)
        finally:
            for handle in handles:
                handle.remove()

    def _branches_of(self, block: str) -> dict[str, Branch]:
        calls = self.calls.get(block, [])
        if len(calls) != 1:
            raise _Refused(f"it runs {len(calls)} times in one forward pass")
        args, _, output = calls[0]
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            raise _Refused("it does not make one map of another")
        if args[0].shape != output.shape:
            raise _Refused("its output has another shape than its input")
        ends = self._ends(block)
        if len(ends) == 1:
            branches = {ends[0]: Branch(block, block, {block: IDENTITY}, self._layers([block]))}
        else:
            branches = {end: self._branch(block, end) for end in ends}
        for branch in branches.values():
            if name := self._feature_inside(branch):
                raise _Refused(f"its {name} is one of the network's feature maps")
        return branches

    def _feature_inside(self, branch: Branch) -> str:
        info = getattr(self.model, "feature_info", None)
        entries = [entry for entry in getattr(info, "info", info) or () if isinstance(entry, Mapping)]
        names = [str(entry.get("module", "")) for entry in entries]
        return next((name for name in names if any(name.startswith(f"{part}.") for part in branch.removed)), "")

    def _difference(self, branches: Mapping[str, Branch]) -> str:
        """What is wrong with the whole network without these branches: it must be the one with zeros in their place."""
        with self._returning(dict.fromkeys(branches, torch.zeros_like)):
            zeroed = self.model(self.images)
        gone = {name: how for branch in branches.values() for name, how in branch.removed.items()}
        try:
            removed = without_modules(self.model, gone).eval()(self.images)
        except Exception as error:  # a network may ask anything of its blocks
            return f"without it the network fails: {first_line(error)}"
        pair = [tree_flatten(x)[0] for x in (zeroed, removed)]
        same = len(pair[0]) == len(pair[1]) and all(map(_same, *pair))
        return "" if same else "the network without it is not the network with zeros in its place"

    # ---- parts of a block

    def _parts(self, block: str) -> list[str]:
        """Children that run once and return one tensor, in the order in which they end."""
        ran: list[str] = []

        def note(name):
            return lambda module, args, output: ran.append(name) if isinstance(output, Tensor) else None

        handles = [self.modules[name].register_forward_hook(note(name)) for name in _children(block, self.modules)]
        try:
            self._run(block)
        finally:
            for handle in handles:
                handle.remove()
        return [name for name in ran if ran.count(name) == 1]

    def _ends(self, block: str) -> tuple[str, ...]:
        """The last parts that, returning zeros, leave the block's input as it is; as few as possible."""
        args, _, _ = self.calls[block][0]
        parts = self._parts(block)[::-1]
        for count in range(1, MOST_BRANCHES + 1):
            for ends in combinations(parts, count):
                with self._returning(dict.fromkeys(ends, torch.zeros_like)):
                    made = self._tried(block)
                if made is not None and torch.equal(made, args[0]):
                    return ends[::-1]
        raise _Refused("its input does not come through, whatever branch returns zeros")

    def _branch(self, block: str, end: str) -> Branch:
        """The branch that ends here: with it go all parts that only it listens to."""
        with self._returning({end: torch.zeros_like}):
            zeroed = self._run(block)
        idle = []
        for part in self._parts(block):
            if part == end or type(self.modules[part]) is nn.Identity:
                continue
            with self._returning({end: torch.zeros_like, part: _disturbed}):
                made = self._tried(block)
            if made is not None and torch.equal(made, zeroed):
                idle.append(part)
        gone = [*idle, end]
        name = max(gone, key=lambda part: sum(p.numel() for p in self.modules[part].parameters()))
        return Branch(name, block, {**dict.fromkeys(idle, IDENTITY), end: ZERO}, self._layers(gone), alone=False)

    def _layers(self, gone: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            name
            for name, module in self.modules.items()
            if any(name == part or name.startswith(part + ".") for part in gone)
            and next(module.parameters(recurse=False), None) is not None
        )

    # ---- running a block

    @contextmanager
    def _returning(self, functions: Mapping[str, Any]) -> Iterator[None]:
        """These parts return what a function makes of their output, for a while."""
        handles = [
            self.modules[name].register_forward_hook(lambda _, __, output, f=function: f(output))
            for name, function in functions.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, block: str) -> Any:
        args, kwargs, _ = self.calls[block][0]
        args, kwargs = _copied((args, kwargs))
        return self.modules[block](*args, **kwargs)

    def _tried(self, block: str) -> Tensor | None:
        try:
            made = self._run(block)
        except (RuntimeError, ValueError, IndexError, TypeError):  # what follows can't do with such values
            return None
        return made if isinstance(made, Tensor) else None


def _children(block: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names of the children that are called; lists of modules have none but their members."""
    for name, _ in modules[block].named_children():
        child = f"{block}.{name}"
        if isinstance(modules[child], (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child, modules)
        else:
            yield child


def _copied(x: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)


def _disturbed(output: Tensor) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return output + noise * (1 + output.abs().mean())


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return True
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max().clamp_min(1.0)))
