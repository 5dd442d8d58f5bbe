"""Networks written by hand to be got wrong (benchmarks/nasty_nets.py): slim = masked, or frozen with a reason.

What `find_channel_groups` lets through is cut to random widths. Where a network then computes something else, the check
that pruning makes at the widths it has chosen must name the group.
"""

import pytest
import torch
from oracle import TOLERANCE, random_keep, seeded, slim_differs_from_masked

import timm_knapsack as tk
from benchmarks.nasty_nets import IMAGE, NASTY, Nasty
from timm_knapsack.channels.verification import differing

# Everything else can be compared by values.
RANDOM = {"dropout_that_is_always_on"}

# Only at one width that verification does not draw; pruning to that width is noticed.
AT_ONE_WIDTH = {"another_way_for_exactly_eleven"}

# What must stay prunable: freezing everything would pass any comparison. The units of the stem that may go.
FREE = {
    "buffer_of_the_width": 16,
    "mask_as_a_buffer": 16,
    "embedding_added": 16,
    "layer_scale": 16,
    "softmax_over_channels": 16,
    "unit_length_over_channels": 16,
    "global_response_norm": 16,
    "einsum_of_a_weight": 16,
    "conv_with_masked_weights": 16,
    "one_conv_called_three_times": 16,
    "channels_padded_by_a_number": 16,
    "stacked_branches": 16,
    "lstm_over_pixels": 16,
    "each_channel_twice": 16,
    "pixels_shuffled_up": 4,
    "pixels_shuffled_down": 16,
    "folded_and_unfolded": 16,
    "torch_attention_with_a_skip": 4,
    "max_out": 8,
    "concatenated_relu": 16,
    "dropout_layers": 16,
    "eca_gate": 16,
}


@pytest.mark.parametrize("name", NASTY)
def test_slim_is_masked_or_frozen_with_a_reason(name):
    net = seeded(Nasty(name))
    groups = tk.find_channel_groups(net, torch.zeros(IMAGE))
    free = {s.param for group in groups for s in group.slices}
    assert "stem.weight" in free or groups.frozen["stem"]
    assert groups["after"].size == 12  # a trick freezes what it touches, no more
    if name in RANDOM:
        assert (groups.verified, groups.verified_note) == ("shapes", "its outputs are random")
        return
    assert groups.verified == "values"
    unseen = 0
    for seed in range(4):
        keep = random_keep(groups, seed, only=lambda group: not group.crosses_norm)
        if not slim_differs_from_masked(net, groups, keep, IMAGE) < TOLERANCE:
            unseen += 1
            assert "stem" in differing(groups, net, groups.check_keep(keep))
    assert unseen == 0 or name in AT_ONE_WIDTH


@pytest.mark.parametrize("name", FREE)
def test_harmless_tricks_do_not_freeze(name):
    groups = tk.find_channel_groups(Nasty(name), torch.zeros(IMAGE))
    made = [g.size for g in groups if any(s.param == "stem.weight" and s.role == "out" for s in g.slices)]
    assert sum(made) == FREE[name]


def test_eleven_channels_are_noticed_when_they_are_chosen():
    net = seeded(Nasty("another_way_for_exactly_eleven"))
    groups = tk.find_channel_groups(net, torch.zeros(IMAGE))
    for width, wrong in ((10, []), (11, ["stem"])):
        keep = groups.check_keep({"stem": range(width)})
        assert (slim_differs_from_masked(net, groups, keep, IMAGE) > TOLERANCE) == bool(wrong)
        assert list(differing(groups, net, keep)) == wrong
