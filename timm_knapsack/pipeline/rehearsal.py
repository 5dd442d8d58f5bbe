"""A dry run of a recipe: everything is built, one step is made on noise, nothing is read or written."""

from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch

from ..channels.find_groups import find_channel_groups
from ..costs.kinds import COSTS
from ..models.model_source import ModelSource
from ..pruning.budget import read_amounts
from .recipe import Recipe, ScorePart, Settings
from .stage import Job, run_stages
from .stages import REHEARSAL, stages

SIDE = 64  # pixels of the synthetic images: the step shows that it runs, not what it costs


def dry_run(recipe: Recipe) -> dict[str, Any]:
    """Build model, groups, budget, losses and optimiser, and make one step on noise.

    Scores are random; nothing is measured, so that a budget of time stands for the same fraction of MACs.

    Example:
        >>> dry_run(Recipe.load("recipes/resnet18_imagenet_1.17g.yaml"))["groups"]
        12
    """
    base, groups = _base(recipe.model.name, tuple(sorted(recipe.model.args.items())))
    settings, notes = _rehearsed(recipe)
    job = NoiseJob(settings, made={"base": base, "groups": groups}, say=lambda line: None)
    run_stages(stages(*REHEARSAL, without=() if recipe.finetune else ("data", "finetune")), job)
    tuned = job.get("tuned")
    return {
        "name": recipe.name,
        "groups": len(groups),
        "units": sum(groups.sizes),
        "costs": [asdict(line) for line in job["student"].result.report.costs],
        "loss": tuned.history[-1]["total"] if tuned is not None else None,
        "notes": notes,
    }


class NoiseJob(Job):
    """A job whose images are one batch of noise."""

    def open(self, purpose: str, **changes) -> Any:
        if purpose != "training":
            return None
        base, groups = self["base"], self["groups"]
        channels, height, width = groups.input_shape[1:]
        generator = torch.Generator().manual_seed(self.settings.seed)
        images = torch.randn(2, channels, min(SIDE, height), min(SIDE, width), generator=generator)
        return [(images, torch.randint(base.num_classes, (2,), generator=generator))]


def _rehearsed(recipe: Recipe) -> tuple[Settings, list[str]]:
    """The recipe's settings without what takes time or data, and notes about that."""
    asked, notes = dict(recipe.budget), []
    for kind in [COSTS[name] for name in asked if COSTS[name].needs_table]:
        amount = read_amounts(asked)[kind.name]
        del asked[kind.name]
        asked.setdefault("macs", amount.value if amount.fraction else 0.5)
        notes.append(f"nothing is measured: the budget of {kind.label} is taken as a fraction of the MACs")
    values = {
        **recipe.finetune, "epochs": 1, "warmup_epochs": 0, "output_dir": None, "trackers": (), "progress": False,
        "mixed_precision": None, "grad_accumulation": 1, "log_interval": 1,
        "ikd_init": "selection",  # the ridge start needs data, and most of the time
    }  # fmt: skip
    score = ScorePart(criterion="random")
    return replace(recipe, budget=asked, score=score, finetune=values), notes


@lru_cache(maxsize=2)
def _base(name: str, args: tuple) -> tuple[Any, Any]:
    """Model and groups; several recipes prune the same network."""
    model = ModelSource(name, pretrained=False, args=dict(args)).load()
    return model, find_channel_groups(model)
