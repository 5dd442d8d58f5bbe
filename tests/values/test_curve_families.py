"""Groups that the same layers read are measured as one."""

import numpy as np
import timm
import torch

import timm_knapsack as tk
from timm_knapsack.values.curves import GroupCurve
from timm_knapsack.values.families import find_families


def padded_streams():
    groups = tk.find_channel_groups(timm.create_model("cifar_resnet20"))
    return groups, next(family for family in find_families(groups) if len(family.members) > 1)


def test_every_group_is_in_one_family():
    groups, _ = padded_streams()
    members = [member.name for family in find_families(groups) for member in family.members]
    assert sorted(members) == sorted(group.name for group in groups)


def test_units_of_a_family_are_its_members_units_one_after_the_other():
    _, family = padded_streams()
    sizes = [member.size for member in family.members]
    assert family.group.size == sum(sizes)
    for joint in family.group.slices:
        parts = [s for m in family.members for s in m.slices if (s.param, s.dim) == (joint.param, joint.dim)]
        assert torch.equal(joint.index, torch.cat([s.index for s in parts]))
    units = torch.arange(1, family.group.size)
    assert torch.equal(family.units(family.keep(units)), units)


def test_each_member_keeps_a_unit():
    _, family = padded_streams()
    kept = family.keep(torch.tensor([family.group.size - 1]))
    assert [len(units) for units in kept.values()] == [1] * len(family.members)


def test_the_members_curves_add_up_to_the_familys():
    _, family = padded_streams()
    size = family.group.size
    order = np.arange(size).reshape(2, -1).T.reshape(-1)  # a unit of each in turn
    error = np.linspace(3.0, 0.0, size + 1) ** 2
    curve = GroupCurve(order, error, np.array([size // 3, size // 2]), np.array([0.4, 0.1]))
    parts = family.split(curve)
    assert np.isclose(sum(part.error[0] for part in parts.values()), error[0])
    for count, loss in zip(curve.counts, curve.loss, strict=True):
        kept = family.keep(torch.from_numpy(order[size - count :].copy()))
        shares = [part.losses()[len(kept[name])] for name, part in parts.items()]
        assert np.isclose(sum(shares), loss)
        assert len(shares) > 1 and max(shares) < loss  # both have lost units, and neither pays for all of it
