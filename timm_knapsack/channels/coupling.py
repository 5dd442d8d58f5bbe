"""From labels to units: which labels live and die together, and which may not go at all."""

from dataclasses import dataclass

import numpy as np

from .labels import Labels, Split


@dataclass
class Coupling:
    """The result: a component for every label, and for frozen components the reason."""

    component: np.ndarray  # [labels]
    frozen: np.ndarray  # bool [components]
    reason: dict[int, str]  # component → why it is frozen
    mixed: np.ndarray  # bool [components]: a norm or softmax runs across these channels
    heads: np.ndarray  # bool [components]: whole attention heads


def couple(labels: Labels) -> Coupling:
    """Solve all ties at once, then decide for each split which of its axes carries the channels."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    if labels.ties:
        rows = np.concatenate([a for a, _ in labels.ties])
        columns = np.concatenate([b for _, b in labels.ties])
    else:
        rows = columns = np.zeros(0, dtype=np.int64)
    graph = coo_matrix((np.ones(rows.size, dtype=np.int8), (rows, columns)), shape=(labels.count, labels.count))
    count, component = connected_components(graph, directed=False)
    forest = _Forest(count, component, labels.fewest_heads)
    for frozen, reason in labels.frozen:
        forest.freeze(frozen, reason)
    for mixed in labels.mixed:
        forest.mixed[component[mixed]] = True
    for shunned in labels.shunned:
        forest.shunned[component[shunned]] = True
    for heads in labels.heads:
        forest.heads[component[heads]] = True
    for heads in labels.whole_heads:
        forest.whole_heads[component[heads]] = True
    pending = list(labels.splits)
    # A split with one possible carrier decides for others that share its axes: take those first, again and again.
    while pending:
        open_splits = []
        for split in pending:
            carriers = [axis for axis in split.axes if not forest.is_frozen(axis.labels).all()]
            if len(carriers) > 1 and not forest.is_frozen(split.flat).all():
                open_splits.append(split)
            else:
                forest.settle(split, carriers[0] if carriers else None)
        if len(open_splits) == len(pending):
            # Heads first: what they leave decides for convs whose groups are parts of heads.
            first = next((i for i, split in enumerate(open_splits) if forest.has_heads(split)), 0)
            best = open_splits.pop(first)
            forest.settle(best, forest.preferred(best))
        pending = open_splits
    root = forest.roots(np.arange(count))
    return Coupling(root[component], forest.frozen, forest.reason, forest.mixed, forest.heads)


class _Forest:
    """Union-find over components, with what is known of each."""

    def __init__(self, count: int, component: np.ndarray, fewest_heads: int):
        self.fewest_heads = fewest_heads
        self.parent = np.arange(count)
        self.component = component
        self.frozen = np.zeros(count, dtype=bool)
        self.mixed = np.zeros(count, dtype=bool)
        self.shunned = np.zeros(count, dtype=bool)
        self.heads = np.zeros(count, dtype=bool)
        self.whole_heads = np.zeros(count, dtype=bool)
        self.reason: dict[int, str] = {}

    def roots(self, ids: np.ndarray) -> np.ndarray:
        while True:
            above = self.parent[ids]
            if np.array_equal(above, ids):
                return ids
            ids = self.parent[above]

    def root_of(self, labels: np.ndarray) -> np.ndarray:
        return self.roots(self.component[labels])

    def is_frozen(self, labels: np.ndarray) -> np.ndarray:
        return self.frozen[self.root_of(labels)]

    def freeze(self, labels: np.ndarray, reason: str) -> None:
        for root in np.unique(self.root_of(labels)).tolist():
            self.frozen[root] = True
            self.reason.setdefault(root, reason)

    def union(self, a: np.ndarray, b: np.ndarray) -> None:
        """Tie two runs of labels, pair by pair."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        pairs = np.stack([self.root_of(a), self.root_of(b)])
        pairs = pairs[:, pairs[0] != pairs[1]]
        if not pairs.size:
            return
        members, place = np.unique(pairs, return_inverse=True)
        place = place.reshape(pairs.shape)
        graph = coo_matrix((np.ones(place.shape[1], dtype=np.int8), tuple(place)), shape=(members.size,) * 2)
        count, joined = connected_components(graph, directed=False)
        first = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(first, joined, members)
        root = first[joined]
        self.parent[members] = root
        for flags in (self.frozen, self.mixed, self.shunned, self.heads, self.whole_heads):
            np.logical_or.at(flags, root, flags[members])
        for member, to in zip(members.tolist(), root.tolist(), strict=True):
            if member in self.reason:
                self.reason.setdefault(to, self.reason[member])

    def has_heads(self, split: Split) -> bool:
        return any(self.whole_heads[self.root_of(axis.labels)].any() for axis in split.axes)

    def preferred(self, split: Split):
        """Heads where there are enough; else the axis that leaves the most units, the later one in a tie.

        Channels that a norm mixes come after others, but where heads are few, or where a norm mixes all of them anyway.
        """
        sizes = [axis.size for axis in split.axes]
        flat = self.root_of(split.flat).reshape(sizes)
        heads = [bool(self.whole_heads[self.root_of(axis.labels)].any()) for axis in split.axes]
        few = any(is_heads and size < self.fewest_heads for is_heads, size in zip(heads, sizes, strict=True))
        few = few or split.narrower
        all_mixed = bool(self.shunned[flat].any())

        def rank(position: int):
            roots = self.root_of(split.axes[position].labels)
            alive = roots[~self.frozen[roots]]
            runs = np.moveaxis(flat, position, 0).reshape(sizes[position], -1)
            joined = _components(runs, roots) if alive.size else 0
            is_heads, unmixed = heads[position], all_mixed or not self.shunned[roots].any()
            within = split.narrower and not is_heads
            return is_heads and not few, within, joined if few else 0, unmixed, joined, position

        candidates = [i for i, axis in enumerate(split.axes) if not self.is_frozen(axis.labels).all()]
        return split.axes[max(candidates, key=rank)]

    def settle(self, split: Split, carrier) -> None:
        """Tie the flat labels to the carrier's, and freeze the other axes."""
        if carrier is None:
            first = self.root_of(split.axes[0].labels)
            self.freeze(split.flat, self.reason.get(int(first[0]), f"none of its parts may shrink ({split.place})"))
            return
        position = next(i for i, axis in enumerate(split.axes) if axis is carrier)
        sizes = [axis.size for axis in split.axes]
        runs = np.moveaxis(split.flat.reshape(sizes), position, 0).reshape(carrier.size, -1)
        self.union(np.repeat(carrier.labels, runs.shape[1]), runs.reshape(-1))
        for axis in split.axes:
            if axis is not carrier:
                self.freeze(axis.labels, f"its channels are counted by another dim ({split.place})")


def _components(runs: np.ndarray, roots: np.ndarray) -> int:
    """Units that are left if each run of labels is tied to the root beside it."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    members, place = np.unique(np.column_stack([roots, runs]), return_inverse=True)
    place = place.reshape(len(roots), -1)
    ends = np.repeat(place[:, 0], place.shape[1] - 1), place[:, 1:].reshape(-1)
    graph = coo_matrix((np.ones(ends[0].size, dtype=np.int8), ends), shape=(members.size,) * 2)
    return connected_components(graph, directed=False)[0]
