"""A dry run of a recipe: everything is built, one step is made on noise, nothing is read or written."""

from dataclasses import asdict
from functools import lru_cache
from typing import Any

from ..costs.kinds import COSTS
from ..models.model_source import ModelSource
from .recipe import Recipe, finetune_config

SIDE = 64  # pixels of the synthetic images: the step shows that it runs, not what it costs


def dry_run(recipe: Recipe) -> dict[str, Any]:
    """Build model, groups, budget, losses and optimiser, and make one step on noise.

    Scores are random; nothing is measured, so that a budget of time stands for the same fraction of MACs.

    Example:
        >>> dry_run(Recipe.load("recipes/resnet18_imagenet_1.17g.yaml"))["groups"]
        12
    """
    import torch

    from ..pruning.budget import Budget
    from ..pruning.prune import prune
    from ..training.finetuning import finetune
    from ..values.gradient_pass import taylor_scores

    model, groups = _base(recipe.model.name, tuple(sorted(recipe.model.args.items())))
    asked, notes = dict(recipe.budget), []
    for kind in [COSTS[name] for name in asked if COSTS[name].needs_table]:
        share = asked.pop(kind.name)
        asked.setdefault("macs", share if isinstance(share, float) else 0.5)
        notes.append(f"nothing is measured: the budget of {kind.label} is taken as a fraction of the MACs")
    scores = taylor_scores(model, groups, None, "random", seed=recipe.seed)
    options = {**asdict(recipe.prune), "base_args": ModelSource(**asdict(recipe.model)).base_args}
    result = prune(model, scores=scores, budget=Budget(**asked), groups=groups, **options)
    loss = None
    if recipe.finetune:
        values = {
            **recipe.finetune,
            "epochs": 1,
            "warmup_epochs": 0,
            "output_dir": None,
            "trackers": (),
            "progress": False,
        }
        values |= {"seed": recipe.seed, "mixed_precision": None, "grad_accumulation": 1, "log_interval": 1}
        values["ikd_init"] = "selection"  # the ridge start needs data, and most of the time
        config = finetune_config(values)
        channels, height, width = groups.input_shape[1:]
        generator = torch.Generator().manual_seed(recipe.seed)
        images = torch.randn(2, channels, min(SIDE, height), min(SIDE, width), generator=generator)
        batch = images, torch.randint(model.num_classes, (2,), generator=generator)
        distils = config.distillation.kd_weight or config.distillation.ikd_weight
        tuned = finetune(result.model, model if distils else None, [batch], None, config, kept=result.kept_channels)
        loss = tuned.history[-1]["total"]
    return {
        "name": recipe.name,
        "groups": len(groups),
        "units": sum(groups.sizes),
        "costs": [asdict(line) for line in result.report.costs],
        "loss": loss,
        "notes": notes,
    }


@lru_cache(maxsize=2)
def _base(name: str, args: tuple) -> tuple[Any, Any]:
    """Model and groups; several recipes prune the same network."""
    from ..channels.find_groups import find_channel_groups

    model = ModelSource(name, pretrained=False, args=dict(args)).load()
    return model, find_channel_groups(model)
