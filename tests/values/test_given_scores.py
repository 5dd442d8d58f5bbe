"""Scores that a caller made: numbers of any real kind are the same scores, others are refused."""

import pytest
import torch
from nets import PlainChain

import timm_knapsack as tk
from timm_knapsack.errors import ScoreError
from timm_knapsack.values.scores import check_scores

GROUPS = tk.find_channel_groups(PlainChain(), torch.empty(1, 3, 8, 8), verify="none")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.uint8])
def test_real_numbers_of_any_kind_are_the_same_scores(dtype):
    for given in (lambda size: torch.arange(size, dtype=dtype), lambda size: list(range(size))):
        checked = check_scores({group.name: given(group.size) for group in GROUPS}, GROUPS)
        for group in GROUPS:
            assert torch.equal(checked[group.name], torch.arange(group.size, dtype=torch.float64))


def test_complex_scores_do_not_lose_their_imaginary_part_unseen():
    with pytest.raises(ScoreError, match=r"scores\['.*'\] is torch.complex64 of shape \[\d+\], not one per unit"):
        check_scores({group.name: torch.ones(group.size, dtype=torch.complex64) for group in GROUPS}, GROUPS)
