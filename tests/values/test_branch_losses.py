"""What a network loses without a branch, run from the block on, is what it loses when it is run from the images."""

import pytest
import torch
from blocks_net import BRANCHES, blocks_net, images

from timm_knapsack.maps.branches import find_branches
from timm_knapsack.maps.distance import output_distance
from timm_knapsack.slim.removed_blocks import without_modules
from timm_knapsack.values.branch_losses import branch_losses


def test_losses_are_those_of_the_whole_network():
    net, batches = blocks_net(), images(16)
    branches, _ = find_branches(net, batches[0])
    losses = branch_losses(net, branches, batches)
    assert list(losses) == BRANCHES
    for branch in branches:
        with torch.no_grad():
            shorter = without_modules(net, branch.removed)
            distances = [output_distance(net(x), shorter(x), logits=True) for x in batches]
        assert losses[branch.name] == pytest.approx(float(torch.cat(distances).mean()), rel=1e-4)


def test_only_what_is_asked_for_is_measured():
    net, batches = blocks_net(), images(8)
    branches, _ = find_branches(net, batches[0])
    assert list(branch_losses(net, branches[1:2], batches)) == ["blocks.1"]
