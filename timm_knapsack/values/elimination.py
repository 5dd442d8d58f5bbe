"""Backward elimination in closed form: in which order a group's units go, and what each step costs after refitting.

With G the mean of x xᵀ over what a consumer sees, W its weights and H = (G + λI)⁻¹, taking a unit's rows S away and
refitting the rest raises the squared error of the consumer's output by tr(W_Sᵀ (H_SS)⁻¹ W_S); H and W then get a rank-k
update (Optimal Brain Surgeon, in blocks). The cheapest units go first, a few percent of those left at once, since a
product with many columns is much faster than many products with one. A group with several consumers adds their costs.

Wide consumers are worked on in float32: the penalty bounds the condition of G + λI, so that orders and errors come out
as in float64 (to six digits with ResNet-50's 4608 inputs), in half the time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

SHARE = 0.04  # of the units left that go in one round
RIDGE = 1e-2  # relative to the mean square of the inputs
COMPACT = 0.8  # rows of removed units are dropped from the matrices when this share is left
WIDE = 1024  # inputs from which on float32 is worth it


@dataclass(frozen=True)
class Consumer:
    """One layer that reads the units of a group, as a matrix product.

    Attributes:
        gram: [inputs, inputs], mean of x xᵀ (centred where the layer can shift its output).
        weight: [inputs, outputs], with each output scaled by what an error in it is worth.
        rows: [units, k], the inputs that belong to each unit: 9 for a channel of a 3×3 conv, the width of a head.
        ridge: penalty on the change of the weights, relative to the mean square of the inputs.
    """

    gram: Tensor
    weight: Tensor
    rows: Tensor
    ridge: float = RIDGE


@dataclass(frozen=True)
class Elimination:
    """The order in which units go, and the squared error of the refitted consumers at each width.

    ``error[n]`` is the error with n units kept: ``error[size]`` is 0, ``error[0]`` that of a group that is all gone.
    """

    order: np.ndarray
    error: np.ndarray
    refitted: Mapping[int, list[Tensor]] = field(default_factory=dict)  # {units kept: weights of each consumer}

    def kept(self, count: int) -> Tensor:
        """The units that are left when ``count`` of them stay, sorted."""
        return torch.from_numpy(np.sort(self.order[len(self.order) - count :]).astype(np.int64))


def eliminate(consumers: Sequence[Consumer], at: Sequence[int] = (), share: float = SHARE) -> Elimination:
    """Remove all units, the cheapest first.

    Args:
        at: numbers of kept units at which the refitted weights are wanted; removed inputs have weight 0 there.
        share: of the units left, how many go before all costs are worked out again; at least one.

    Example:
        >>> x = torch.tensor([[1.0, 0, 1], [0, 2, 0], [1, 2, 1], [1, 0, 1.1]]).double()  # inputs 0 and 2 are alike
        >>> found = eliminate([Consumer(x.T @ x / 4, torch.ones(3, 1).double(), torch.arange(3)[:, None])])
        >>> found.order.tolist()
        [0, 1, 2]
    """
    wide = max(len(consumer.gram) for consumer in consumers) >= WIDE
    try:
        return _eliminate(consumers, at, share, torch.float32 if wide else torch.float64)
    except torch.linalg.LinAlgError:  # float32 was not enough: rounding has made a corner of H negative
        if not wide:
            raise
        return _eliminate(consumers, at, share, torch.float64)


def _eliminate(consumers: Sequence[Consumer], at: Sequence[int], share: float, dtype: torch.dtype) -> Elimination:
    size = len(consumers[0].rows)
    states = [_State(consumer, dtype) for consumer in consumers]
    alive = torch.arange(size)
    order: list[int] = []
    error = [0.0]
    refitted: dict[int, list[Tensor]] = {}
    while len(alive):
        if len(alive) in at:
            refitted[len(alive)] = [state.full_weight() for state in states]
        costs = sum(state.costs(alive) for state in states)
        count = max(1, int(len(alive) * share))
        count = min([count, *(len(alive) - stop for stop in at if stop < len(alive))])  # stop at each wanted width
        cheapest = costs.argsort()[:count]
        units = alive[cheapest]
        joint = max(sum(state.remove(units) for state in states), 0.0)
        steps = costs[cheapest].clamp_min(0).cumsum(0)  # how the joint cost of the round is spread over its units
        error += (error[-1] + steps * (joint / max(float(steps[-1]), 1e-300))).tolist()
        order += units.tolist()
        mask = torch.ones(len(alive), dtype=torch.bool)
        mask[cheapest] = False
        alive = alive[mask]
    return Elimination(np.array(order), np.array(error[::-1]), refitted)


class _State:
    """H and W of one consumer, on the way."""

    def __init__(self, consumer: Consumer, dtype: torch.dtype):
        gram = consumer.gram.to(dtype)
        penalty = consumer.ridge * gram.diagonal().mean().clamp_min(1e-30)
        factor, failed = torch.linalg.cholesky_ex(_damped(gram, penalty))
        if failed and dtype is not torch.float64:
            raise torch.linalg.LinAlgError("not positive definite in this precision")
        if failed:  # a Gram matrix of one or two positions is rounding alone, and the penalty less than that
            factor = torch.linalg.cholesky(_damped(gram, penalty + gram.abs().sum(1).max()))
        self.inverse = torch.cholesky_inverse(factor)
        self.weight = consumer.weight.to(dtype).clone()
        self.rows = consumer.rows.clone()
        self.inputs = torch.arange(len(gram))  # what the rows of the matrices stand for
        self.left = torch.ones(len(gram), dtype=torch.bool)
        self.shape = consumer.weight.shape

    def full_weight(self) -> Tensor:
        weight = self.weight.new_zeros(self.shape)
        stay = self.left.nonzero().flatten()
        weight[self.inputs[stay]] = self.weight[stay]
        return weight.double()

    def costs(self, units: Tensor) -> Tensor:
        rows = self.rows[units]
        own = self.weight[rows]  # [units, k, outputs]
        corner = self.inverse[rows[:, :, None], rows[:, None, :]]
        solved = own / corner if rows.shape[1] == 1 else torch.linalg.solve(corner, own)
        return (own * solved).sum((1, 2)).double()

    def remove(self, units: Tensor) -> float:
        """Take the units away and refit; returns what it costs."""
        rows = self.rows[units].reshape(-1)
        columns = self.inverse[:, rows]
        factor = torch.linalg.cholesky(columns[rows])
        own = torch.linalg.solve_triangular(factor, self.weight[rows], upper=False)
        cost = float(own.square().sum())
        half = torch.linalg.solve_triangular(factor, columns.T, upper=False)  # [rows, inputs]
        self.weight.addmm_(half.T, own, alpha=-1)
        self.inverse.addmm_(half.T, half, alpha=-1)
        self.left[rows] = False
        if self.left.sum() < COMPACT * len(self.left):
            self._drop_removed()
        return cost

    def _drop_removed(self) -> None:
        stay = self.left.nonzero().flatten()
        place = torch.zeros(len(self.left), dtype=torch.long)
        place[stay] = torch.arange(len(stay))
        self.inverse, self.weight = self.inverse[stay][:, stay], self.weight[stay]
        self.rows, self.inputs = place[self.rows], self.inputs[stay]
        self.left = self.left[stay]


def _damped(gram: Tensor, penalty: Tensor) -> Tensor:
    damped = gram.clone()
    damped.diagonal().add_(penalty)
    return damped
