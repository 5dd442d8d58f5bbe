"""Running a recipe: stages on disk, each skipped as long as what it depends on is unchanged.

A stage's folder holds ``stage.json`` with the hash of its inputs, written last: a stage that was interrupted counts as
not done. The hash covers the recipe's part, the state of local files, and the hashes of the stages before. What a stage
made is always read back from its folder, so that a run in one go and one that was interrupted do the same.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..costs.kinds import COSTS
from ..costs.latency.table import LatencyTable
from ..errors import RecipeError
from ..files.plain_json import write_json
from ..models.model_source import ModelSource
from ..reports.run_record import RunRecord
from ..training.config import FinetuneConfig
from ..training.evaluation import start_accelerator
from ..values.valuation import load_values
from ..version import __version__
from .progress import say as say_on_stderr
from .recipe import Recipe, finetune_config
from .saving import save_run
from .stage import Job, Stage, Student, run_stage
from .stages import RUN, STAGES

IN_MEMORY = ("model", "data", "groups")  # quick to make again; all others are kept on disk
KEPT = tuple(name for name in RUN if name not in IN_MEMORY)
STATES = {"prune": "pruned", "recover": "recovered", "finetune": "fine-tuned"}  # the student after each stage


def run_recipe(
    recipe: Recipe,
    folder: str | os.PathLike,
    *,
    from_stage: str | None = None,
    device: str = "cpu",
    say: Callable[[str], Any] = say_on_stderr,
) -> dict[str, Any]:
    """Run a recipe in a folder; returns what was done and what came out.

    Args:
        from_stage: redo this stage and those after it, whatever is on disk.
        device: where scoring, recovery and evaluation run; fine-tuning runs where Accelerate says.
        say: gets the line of each stage that runs.

    Example:
        >>> from timm_knapsack.pipeline.digits import write_images
        >>> network = {"name": "cifar_resnet20", "pretrained": False, "args": {"channels": [4, 4, 4]}}
        >>> parts = {"score": {"criterion": "magnitude"}, "recover": {"images": 8}, "budget": {"macs": 0.5}}
        >>> data = {"source": str(write_images("digits"))}
        >>> recipe = Recipe.from_dict({"name": "tiny", "model": network, "data": data, **parts})
        >>> result = run_recipe(recipe, "runs/tiny")
        >>> [row["what"] for row in result["evaluations"]]
        ['original', 'pruned', 'recovered']
    """
    if from_stage is not None and from_stage not in KEPT:
        raise RecipeError(f"there is no stage {from_stage!r} to start from; there are {', '.join(KEPT)}")
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    job = DiskJob.of(recipe, Path(folder), device, say)
    states = _run(job, from_stage)
    saved = job.folder_of("save") / "model"
    record = RunRecord.load(saved)
    return {
        "name": recipe.name,
        "stages": states,
        "main_process": job.is_main,
        "model": str(saved),
        "report": str(saved / "report.html"),
        "pruning": record.pruning,
        "evaluations": record.evaluations,
    }


@dataclass
class DiskJob(Job):
    """A job whose results lie in a folder for each stage."""

    runs: Path = Path()
    current: str = RUN[0]
    skipped: tuple[str, ...] = field(default_factory=tuple)  # stages that the recipe does without

    @classmethod
    def of(cls, recipe: Recipe, folder: Path, device: str, say: Callable[[str], Any]) -> "DiskJob":
        about = {"command": f"timm-knapsack run {recipe.name}.yaml", "notes": [recipe.about] if recipe.about else []}
        places = {"runs": folder, "folder": folder / "save" / "model", "checkpoints": folder / "finetune/checkpoints"}
        skipped = tuple(name for name in RUN if not _wanted(recipe, name))
        job = cls(recipe, device=device, say=say, skipped=skipped, **about, **places)
        job.source.check()
        config = job.finetune_config()
        job.accelerator = start_accelerator(config.mixed_precision, config.trackers, config.output_dir)
        if job.accelerator.num_processes > 1:
            job.device = str(job.accelerator.device)  # each process its own
        return job

    def folder_of(self, stage: str) -> Path:
        return self.runs / stage

    def get(self, name: str) -> Any:
        """From memory, or from the folder of the last stage that made it."""
        if name not in self.made:
            for stage in reversed(self._before()):
                if name in STAGES[stage].makes:
                    return _read(name, stage, self)
        return self.made.get(name)

    def versions(self) -> Iterator[tuple[str, nn.Module]]:
        yield "original", self["base"]
        for stage in self._before():
            if stage in STATES:
                yield STATES[stage], _read("student", stage, self).model

    def finetune_config(self) -> FinetuneConfig:
        """A checkpoint of the same inputs is gone on with; one of others is given up."""
        values = {"seed": self.settings.seed, **self.settings.finetune, "overwrite": not self.resume}
        return finetune_config(values, output_dir=str(self.checkpoints))

    def _before(self) -> list[str]:
        names = RUN[: RUN.index(self.current)]
        return [name for name in names if name in KEPT and name not in self.skipped]


# ---- which stages run ---------------------------------------------------------------------------------------------


def _run(job: DiskJob, from_stage: str | None) -> dict[str, str]:
    """Run what has changed; for each stage that the recipe has, whether it was done or skipped."""
    redo = KEPT[KEPT.index(from_stage) :] if from_stage else ()
    keys = _keys(job)
    todo = [n for n in keys if n not in job.skipped and (n in redo or _done(job.folder_of(n)) != keys[n])]
    if "save" in todo and "report" not in todo:
        todo.append("report")  # saving replaces the folder that the report lies in
    needed: set[str] = set()
    for name in reversed(RUN):  # what is only made in memory is made if a stage after it takes it
        stage = STAGES[name]
        if name in IN_MEMORY and needed & set(stage.makes):
            todo.append(name)
        if name in todo:
            needed |= {*stage.needs, *stage.uses}
    job.wanted = frozenset(needed)
    for name in RUN:
        if name in todo:
            job.current = name
            _run_here(STAGES[name], job, keys.get(name))
    return {name: "done" if name in todo else "unchanged, skipped" for name in KEPT if name not in job.skipped}


def _run_here(stage: Stage, job: DiskJob, key: str | None) -> None:
    """Run a stage on the processes that it is for, and keep what it made on disk, if it has a key."""
    folder = job.folder_of(stage.name)
    main, wait = job.is_main, job.accelerator.wait_for_everyone
    if key is not None and main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stage.json").unlink(missing_ok=True)
    wait()
    if stage.resumes:
        mark = folder / "started.json"
        job.resume = mark.exists() and json.loads(mark.read_text()).get("key") == key
        wait()  # all have looked before one writes
        if main and not job.resume:
            write_json(mark, {"key": key})
    if stage.everywhere or main:  # the others are quick, or measure this one machine
        run_stage(stage, job)
    if key is not None:
        for name in stage.makes:
            thing = job.made.pop(name, None)
            if main and thing is not None:
                _write(name, thing, folder)
    wait()
    if key is not None and main:
        write_json(folder / "stage.json", {"stage": stage.name, "key": key, "version": __version__})
    wait()


def _wanted(recipe: Recipe, stage: str) -> bool:
    if stage in COSTS:  # a stage of a cost's name measures what that cost needs
        return stage in recipe.budget
    if stage == "recover":
        return recipe.recover.images > 0
    return stage != "finetune" or bool(recipe.finetune)


def _done(folder: Path) -> str | None:
    try:
        return json.loads((folder / "stage.json").read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- hashes of inputs ---------------------------------------------------------------------------------------------


def _keys(job: DiskJob) -> dict[str, str]:
    recipe = job.settings.to_dict()
    model = {**recipe["model"], "state": file_state(job.source.name, job.source.weights)}
    data = {**recipe["data"], "state": file_state(recipe["data"]["source"], recipe["data"]["eval_source"])}
    parts = {
        "latency": [model, recipe["latency"]],
        "score": [model, data, recipe["score"], recipe["seed"]],
        "prune": [recipe["budget"], recipe["prune"]],
        "recover": [data, recipe["recover"], recipe["seed"]],
        "finetune": [data, recipe["finetune"], recipe["seed"]],
        "evaluate": [data],
        "save": [recipe["name"], recipe["about"], recipe["paper"]],
        "report": [],
    }
    keys: dict[str, str] = {}
    for name in KEPT:
        before = [keys[earlier] for earlier in stages_before(name)]
        text = json.dumps([name, __version__, before, parts[name]], sort_keys=True, default=str)
        # a stage that the recipe does without stands for what lies before it
        keys[name] = "-".join(before) if name in job.skipped else hashlib.sha256(text.encode()).hexdigest()[:24]
    return keys


def stages_before(name: str) -> list[str]:
    """The stages whose results a stage depends on directly: those behind another one of them are left out.

    Example:
        >>> stages_before("prune"), stages_before("save")
        (['latency', 'score'], ['evaluate'])
    """
    makers = {}
    for earlier in KEPT[: KEPT.index(name)]:
        makers |= {thing: earlier for thing in STAGES[earlier].makes}
    found = {makers[thing] for thing in STAGES[name].needs + STAGES[name].uses if thing in makers}
    covered = {further for one in found for further in _all_before(one)}
    return [one for one in KEPT if one in found - covered]


def _all_before(name: str) -> set[str]:
    direct = stages_before(name)
    return {*direct, *(further for one in direct for further in _all_before(one))}


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


# ---- what stages make, on disk ------------------------------------------------------------------------------------

FILES = {"table": "table.json", "scores": "scores.safetensors", "student": "model", "evaluations": "evaluations.json"}


def _write(name: str, thing: Any, folder: Path) -> None:
    if name in ("table", "scores"):
        thing.save(folder / FILES[name])
    elif name == "student":
        save_run(thing.savable, folder / FILES[name], record=thing.record, notes=thing.record.notes, draw=False)
    elif name == "evaluations":
        write_json(folder / FILES[name], thing)


def _read(name: str, stage: str, job: DiskJob) -> Any:
    folder = job.folder_of(stage)
    if name == "table":
        return LatencyTable.load(folder / FILES[name])
    if name == "scores":
        return load_values(folder / FILES[name], job["groups"])
    if name == "student":
        path = folder / FILES[name]
        return Student(ModelSource(str(path)).load().to(job.device), RunRecord.load(path), STATES[stage])
    if name == "evaluations":
        return json.loads((folder / FILES[name]).read_text())
    return folder / "model" if name == "saved" else None
