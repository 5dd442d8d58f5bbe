"""Running a recipe: stages on disk, each skipped as long as what it depends on is unchanged.

A stage's folder holds ``stage.json`` with the hash of its inputs, written last: a stage that was interrupted counts as
not done. The hash covers the recipe's part, the state of local files, and the hashes of the stages before.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..costs.kinds import COSTS
from ..errors import RecipeError
from ..files.plain_json import write_json
from ..models.model_source import ModelSource
from ..reports.run_record import RunRecord
from ..version import __version__
from .recipe import Recipe, finetune_config

STAGES = ("latency", "score", "prune", "recover", "finetune", "evaluate", "save")
AFTER = {  # stage → the stages whose results it uses
    "latency": (), "score": (), "prune": ("latency", "score"), "recover": ("prune",), "finetune": ("recover",),
    "evaluate": ("finetune",), "save": ("evaluate",),
}  # fmt: skip


def run_recipe(
    recipe: Recipe,
    folder: str | os.PathLike,
    *,
    from_stage: str | None = None,
    device: str = "cpu",
    say: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Run a recipe in a folder; returns what was done and what came out.

    Args:
        from_stage: redo this stage and those after it, whatever is on disk.
        device: where scoring, recovery and evaluation run; fine-tuning runs where Accelerate says.

    Example:
        >>> result = run_recipe(Recipe.load("recipes/resnet56_cifar10_57.9m.yaml"), "runs/resnet56", device="cpu")
        >>> result["stages"]["prune"]
        'done'
    """
    if from_stage is not None and from_stage not in STAGES:
        raise RecipeError(f"--from {from_stage!r} is no stage; there are {', '.join(STAGES)}")
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return _Run(recipe, Path(folder), device, say).run(from_stage)


class _Run:
    def __init__(self, recipe: Recipe, folder: Path, device: str, say: Callable[[str], Any]):
        self.recipe, self.folder, self.device, self.say = recipe, folder, device, say
        self.source = ModelSource(**asdict(recipe.model))
        self.source.check()
        self._base = self._groups = self._accelerator = None
        if self.accelerator.num_processes > 1:
            self.device = str(self.accelerator.device)  # each process its own

    # ---- what the stages share

    @property
    def accelerator(self):
        if self._accelerator is None:
            from ..training.evaluation import start_accelerator

            config = self.config
            self._accelerator = start_accelerator(config.mixed_precision, config.trackers, config.output_dir)
        return self._accelerator

    @property
    def config(self):
        values = {"seed": self.recipe.seed, **self.recipe.finetune}
        return finetune_config(values, output_dir=str(self.folder / "finetune" / "checkpoints"))

    @property
    def base(self):
        if self._base is None:
            self._base = self.source.load().to(self.device)
        return self._base

    @property
    def groups(self):
        if self._groups is None:
            from ..channels.find_groups import find_channel_groups

            self._groups = find_channel_groups(self.base)
        return self._groups

    def loader(self, model, part: str, **options):
        """A loader of the recipe's data: part "train" or "eval"."""
        from ..images.loaders import create_loader

        data = self.recipe.data
        source = data.eval_source or data.source if part == "eval" else data.source
        names = ("image_column", "label_column", "subset", "root", "input_size", "num_workers")
        common = {name: getattr(data, name) for name in names}
        split = data.eval_split if part == "eval" else data.train_split
        return create_loader(source, model, split=split, seed=self.recipe.seed, **common, **options)

    def load(self, stage: str):
        return ModelSource(str(self.folder / stage / "model")).load().to(self.device)

    # ---- running

    def run(self, from_stage: str | None) -> dict[str, Any]:
        redo = set(STAGES[STAGES.index(from_stage) :]) if from_stage else set()
        keys: dict[str, str] = {}
        states: dict[str, str] = {}
        for stage in STAGES:
            if not self.wanted(stage):
                keys[stage] = "-".join(keys[before] for before in AFTER[stage])
                continue
            keys[stage] = self.key(stage, [keys[before] for before in AFTER[stage]])
            if stage not in redo and self.done(stage) == keys[stage]:
                states[stage] = "unchanged, skipped"
                continue
            self.say(f"{stage} …")
            self.do(stage, keys[stage])
            states[stage] = "done"
        record = RunRecord.load(self.folder / "save" / "model")
        return {
            "name": self.recipe.name,
            "stages": states,
            "main_process": self.accelerator.is_main_process,
            "model": str(self.folder / "save" / "model"),
            "report": str(self.folder / "save" / "model" / "report.html"),
            "pruning": record.pruning,
            "evaluations": record.evaluations,
        }

    def wanted(self, stage: str) -> bool:
        recipe = self.recipe
        if stage in COSTS:  # a stage of a cost's name measures what that cost needs
            return stage in recipe.budget
        if stage == "recover":
            return recipe.recover.images > 0
        return stage != "finetune" or bool(recipe.finetune)

    def key(self, stage: str, before: list[str]) -> str:
        recipe = self.recipe.to_dict()
        model = {**recipe["model"], "state": file_state(self.source.name, self.source.weights)}
        data = {**recipe["data"], "state": file_state(recipe["data"]["source"], recipe["data"]["eval_source"])}
        parts = {
            "latency": [model, recipe["latency"]],
            "score": [model, data, recipe["score"], recipe["seed"]],
            "prune": [recipe["budget"], recipe["prune"]],
            "recover": [data, recipe["recover"], recipe["seed"]],
            "finetune": [data, recipe["finetune"], recipe["seed"]],
            "evaluate": [data],
            "save": [recipe["name"], recipe["about"], recipe["paper"]],
        }
        text = json.dumps([stage, __version__, before, parts[stage]], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def done(self, stage: str) -> str | None:
        try:
            return json.loads((self.folder / stage / "stage.json").read_text())["key"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def do(self, stage: str, key: str) -> None:
        folder = self.folder / stage
        main, wait = self.accelerator.is_main_process, self.accelerator.wait_for_everyone
        if main:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "stage.json").unlink(missing_ok=True)
        wait()
        if stage in ("score", "finetune", "evaluate") or main:  # the others are quick, or measure this one machine
            getattr(self, f"do_{stage}")(folder, key)
        wait()
        if main:
            write_json(folder / "stage.json", {"stage": stage, "key": key, "version": __version__})
        wait()

    # ---- the stages

    def do_latency(self, folder: Path, key: str) -> None:
        import torch

        from ..costs.latency.table import LatencyTable

        part = self.recipe.latency
        (folder / "table.json").unlink(missing_ok=True)
        model = self.base if part.device == "auto" else self.source.load().to(part.device)
        table = LatencyTable.measure(
            model, batch_size=part.batch_size, dtype=torch.float16 if part.half else None, threads=part.threads,
            channels_last=part.channels_last or None, compile=part.compile, max_seconds=part.seconds,
        )  # fmt: skip
        table.save(folder / "table.json")

    def do_score(self, folder: Path, key: str) -> None:
        from ..images.model_labels import CALIBRATION, ModelLabels
        from ..values.criteria import CRITERIA
        from ..values.gradient_pass import taylor_scores

        part = self.recipe.score
        loader = None
        if CRITERIA.find(part.criterion).needs_data:
            labels = {"data": "required", "model": "ignore"}.get(part.labels)
            if labels is None:
                raise RecipeError(f"score.labels is {part.labels!r}, expected data or model")
            options = {**CALIBRATION, "limit": part.images, "batch_size": part.batch_size, "labels": labels}
            loader = self.loader(self.base, "train", **options)
            loader = ModelLabels(loader, self.base) if part.labels == "model" else loader
        scores = taylor_scores(
            self.base, self.groups, loader, part.criterion, self.accelerator, per_sample=part.per_sample,
            data=self.recipe.data.source,
        )  # fmt: skip
        if self.accelerator.is_main_process:
            scores.save(folder / "scores.safetensors")

    def do_prune(self, folder: Path, key: str) -> None:
        from ..costs.latency.table import LatencyTable
        from ..pruning.budget import Budget
        from ..pruning.prune import prune
        from ..values.scores import Scores
        from .saving import save_run

        table = LatencyTable.load(self.folder / "latency" / "table.json") if self.wanted("latency") else None
        scores = Scores.load(self.folder / "score" / "scores.safetensors", self.groups)
        result = prune(
            self.base, scores=scores, budget=Budget(**self.recipe.budget, table=table), groups=self.groups,
            base_args=self.source.base_args, **asdict(self.recipe.prune),
        )  # fmt: skip
        save_run(result, folder / "model", self.source, draw=False)

    def do_recover(self, folder: Path, key: str) -> None:
        from ..images.model_labels import CALIBRATION
        from ..recovery.closed_form import recover
        from .saving import save_run

        part = self.recipe.recover
        record, student = RunRecord.load(self.folder / "prune" / "model"), self.load("prune")
        options = {**CALIBRATION, "limit": part.images, "batch_size": part.batch_size, "labels": "ignore"}
        recover(student, self.base, self.loader(student, "train", **options), kept=kept_tensors(record))
        save_run(student, folder / "model", record=record, draw=False)

    def do_finetune(self, folder: Path, key: str) -> None:
        from ..training.finetuning import finetune
        from .saving import save_run

        before = "recover" if self.wanted("recover") else "prune"
        part, config = self.recipe.finetune, self.config
        record, student = RunRecord.load(self.folder / before / "model"), self.load(before)
        batch = int(part.get("batch_size", 64))
        train = self.loader(
            student, "train", training=True, batch_size=batch, labels="required", augmentation=part.get("augmentation")
        )
        test = self.loader(student, "eval", batch_size=batch, labels="required")
        # a checkpoint of the same inputs is gone on with; one of others is given up
        mark = folder / "started.json"
        same = mark.exists() and json.loads(mark.read_text()).get("key") == key
        self.accelerator.wait_for_everyone()  # all have looked before one writes
        if self.accelerator.is_main_process and not same:
            write_json(mark, {"key": key})
        if not same:
            config = finetune_config(
                {**part, "seed": self.recipe.seed, "overwrite": True}, output_dir=config.output_dir
            )
        distils = config.distillation.kd_weight or config.distillation.ikd_weight
        result = finetune(
            student, self.base if distils else None, train, test, config, accelerator=self.accelerator,
            kept=kept_tensors(record), resume=same,
        )  # fmt: skip
        if result.interrupted:
            raise RecipeError(f"stopped by a signal after update {result.updates}; the same command goes on from there")
        if self.accelerator.is_main_process:
            record.add_finetuning(config, result)
            model = result.model
            model.channel_config = student.channel_config
            save_run(model, folder / "model", record=record, draw=False)

    def last(self, upto: str = "finetune") -> str:
        return next(
            s for s in ("finetune", "recover", "prune") if self.wanted(s) and STAGES.index(s) <= STAGES.index(upto)
        )

    def do_evaluate(self, folder: Path, key: str) -> None:
        from ..training.evaluation import evaluate

        rows = []
        names = {"prune": "pruned", "recover": "recovered", "finetune": "fine-tuned"}
        todo = [("original", self.base)] + [(names[s], self.load(s)) for s in names if self.wanted(s)]
        for what, model in todo:
            loader = self.loader(model, "eval", batch_size=64, labels="required")
            rows.append({"what": what, **evaluate(model, loader, self.accelerator)})
        if self.accelerator.is_main_process:
            write_json(folder / "evaluations.json", rows)

    def do_save(self, folder: Path, key: str) -> None:
        from ..reports.page import write_report
        from .saving import save_run

        record = RunRecord.load(self.folder / self.last() / "model")
        rows = json.loads((self.folder / "evaluate" / "evaluations.json").read_text())
        data = self.recipe.data.eval_source or self.recipe.data.source
        for row in rows:
            record.add_evaluation(row.pop("what"), row, data)
        record.command = f"timm-knapsack run {self.recipe.name}.yaml"
        first, final = record.evaluations[0], record.evaluations[-1]
        saved, _ = save_run(
            self.load(self.last()), folder / "model", record=record,
            evaluation={
                "dataset": data, "split": self.recipe.data.eval_split, "top1": final["top1"], "top5": final["top5"],
                "samples": final["samples"], "original_top1": first["top1"],
            },
            notes=[self.recipe.about] if self.recipe.about else [],
        )  # fmt: skip
        write_report(saved)


def kept_tensors(record: RunRecord) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(index) for name, index in record.kept_channels.items()}


def file_state(*names: str | None) -> list[Any]:
    """Sizes and times of local files, so that a changed file is noticed; nothing for what is not local."""
    state = []
    for name in names:
        path = Path((name or "").removeprefix("local-dir:"))
        if name and path.exists():
            files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            total = [(os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
            state.append(
                [str(path.resolve()), len(files), sum(s for s, _ in total), max((t for _, t in total), default=0)]
            )
    return state
