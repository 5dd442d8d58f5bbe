"""Products over many positions: sums of x xᵀ, half of which say it all, and narrow products of many small groups.

Of a depthwise conv's products [groups, positions, 9] × [groups, 9, 1] the BLAS makes one slow call for each group; the
same product transposed, with the narrow side first, takes a fifth of the time and is no slower for whole matrices.
"""

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


def products(x: Tensor, weight: Tensor) -> Tensor:
    """[groups, positions, inputs] × [groups, inputs, outputs].

    Example:
        >>> products(torch.ones(2, 5, 9), torch.ones(2, 9, 1)).shape
        torch.Size([2, 5, 1])
    """
    return (weight.transpose(1, 2) @ x.transpose(1, 2)).transpose(1, 2)


def cross_products(x: Tensor, target: Tensor) -> Tensor:
    """Sums over positions of inputs × targets: [groups, inputs, outputs].

    Example:
        >>> cross_products(torch.ones(2, 5, 9), torch.ones(2, 5, 1)).shape
        torch.Size([2, 9, 1])
    """
    return (target.transpose(1, 2) @ x).transpose(1, 2)


def mirrored(total: Tensor) -> Tensor:
    """The symmetric matrix whose upper half `add_gram` has added up."""
    return mirror(total.clone())


def mirror(total: Tensor) -> Tensor:
    """As `mirrored`, in place.

    Example:
        >>> upper = torch.ones(1, 600, 600).triu()
        >>> bool((mirror(upper)[0, 512:, :512] == 1).all())
        True
    """
    for start in range(BLOCK, total.shape[2], BLOCK):  # blocks on the diagonal are whole already
        total[:, start:, start - BLOCK : start] = total[:, start - BLOCK : start, start:].transpose(1, 2)
    return total
