"""Sums of x xᵀ over many positions: half of such a matrix says it all, so half is computed."""

from torch import Tensor

BLOCK = 512  # columns at once: wide enough for a fast product, narrow enough to leave the other half out


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add xᵀ x of [groups, positions, inputs] to the upper half of a float64 sum; `mirrored` fills in the lower one.

    Example:
        >>> total = torch.zeros(1, 2, 2, dtype=torch.float64)
        >>> add_gram(total, torch.tensor([[[1.0, 2.0], [0.0, 1.0]]]))
        >>> mirrored(total)
        tensor([[[1., 2.],
                 [2., 5.]]], dtype=torch.float64)
    """
    for start in range(0, x.shape[2], BLOCK):
        total[:, start : start + BLOCK, start:] += x[:, :, start : start + BLOCK].transpose(1, 2) @ x[:, :, start:]


def mirrored(total: Tensor) -> Tensor:
    """The symmetric matrix whose upper half `add_gram` has added up."""
    result = total.clone()
    for start in range(BLOCK, total.shape[2], BLOCK):  # blocks on the diagonal are whole already
        result[:, start:, start - BLOCK : start] = total[:, start - BLOCK : start, start:].transpose(1, 2)
    return result
