"""The stages of the pipeline, each written once, and the lists that are made of them.

    model → data → groups → latency → score → prune → recover → finetune → evaluate → save → report

Each function takes the `Job`, puts what it makes into it, and returns its figures in words. `STAGES` says what each
needs and makes; a command is a list of their names.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import timm
import torch

from ..channels.find_groups import find_channel_groups
from ..costs.counted import count_params
from ..costs.latency.network_timing import compare_latency
from ..costs.latency.table import LatencyTable
from ..errors import KnapsackError, StoppedError
from ..human_numbers import human
from ..models.model_source import ModelSource
from ..pruning.budget import Budget
from ..pruning.choose import check_reachable, sweep
from ..recovery.closed_form import LayerFit, recover_layers
from ..recovery.refinement import images_to_fit, refine_steps
from ..reports.page import write_report
from ..reports.run_record import RunRecord
from ..slim.tensor_files import write_tensors
from ..training.evaluation import evaluate
from ..training.finetuning import finetune
from ..values.curves import FORMAT as CURVES
from ..values.valuation import CRITERIA, load_values, value_channels
from ..values.value_files import format_of
from .baselines import RECOVERED, smaller_images
from .blocks import choose_by_trial
from .loaders import PURPOSES, count_images, hold_out, on_the_hub
from .measured_loss import collapse_warning, measure_loss, recovered_if_better
from .narrower_heads import turn_heads
from .recipe import finetune_config
from .saving import save_run
from .stage import Job, Stage, Student, run_stages

# ---- what is there before anything is pruned ----------------------------------------------------------------------


def _model(job: Job) -> str:
    job.made["base"] = base = job.source.load().to(job.device)
    return f"{job.source.name}, {human(count_params(base))} parameters"


def _groups(job: Job) -> str:
    given = job.options.get("scores")
    by_curves = CRITERIA.find(job.settings.score.criterion).curves is not None
    images = job.get("calibration")
    if images is not None and (format_of(given) == CURVES if given else by_curves):
        job.made["base"] = turn_heads(job["base"], images)
    job.made["groups"] = groups = find_channel_groups(job["base"])
    budget = job.settings.budget
    if budget is not None and len(groups):  # what can't be is said before hours of work, not after
        asked = budget.asked if isinstance(budget, Budget) else budget
        limits = asdict(job.settings.prune)
        if not limits.pop("blocks"):  # with blocks gone, what is smallest is not known yet
            check_reachable(job["base"], groups, asked, **limits)
    return f"{len(groups)} groups of {sum(groups.sizes)} units, {human(groups.macs())} MACs"


def _data(job: Job) -> str:
    """Open all loaders at once: images that can't be read are found before hours of work, not after."""
    counts = []
    scored_on_images = CRITERIA.find(job.settings.score.criterion).needs_data
    for purpose in PURPOSES:
        if purpose in job.wanted and (purpose != "calibration" or scored_on_images):
            job.made[purpose] = loader = job.open(purpose)
            if loader is not None:
                counts.append(f"{count_images(loader) or 'a stream of'} images for {purpose}")
    return ", ".join(counts) or "no images"


def _train(job: Job) -> str:
    """Train the network that will be pruned, on labels alone, and keep its weights in a file."""
    options = dict(job.options["train"])
    path = options.pop("weights")
    config = finetune_config({"distillation": {"kd_weight": 0, "ikd_weight": 0}, "freeze_bn_stats": False, **options})
    tuned = finetune(
        job["base"], None, job["training"], None, config, accelerator=job.accelerator,
        say=lambda line: job.say(f"train: {line}"),
    )  # fmt: skip
    if tuned.interrupted:  # what comes next would prune a network that has learnt little
        raise StoppedError(f"stopped after update {tuned.updates}")
    write_tensors(path, job["base"].state_dict())
    job.source = replace(job.source, pretrained=False, weights=str(path))  # what was pruned, for whoever goes on
    return f"{_count(config.epochs, 'epoch')}, {_count(tuned.updates, 'update')}"


# ---- values and costs ---------------------------------------------------------------------------------------------


def _latency(job: Job) -> str:
    part = job.settings.latency
    model = job["base"] if part.device == "auto" else job.source.load().to(part.device)
    job.made["table"] = table = LatencyTable.measure(model, conditions=part.conditions(), progress=sys.stderr.isatty())
    return f"{len(table.layers)} layers at batch {part.batch_size}, {len(table.visits)} visits"


def _score(job: Job) -> str:
    part = job.settings.score
    options = {"data": job.data_name, "per_sample": part.per_sample}
    if CRITERIA.find(part.criterion).curves is None:
        options["seed"] = job.settings.seed
    job.made["scores"] = scores = value_channels(
        job["base"], job["groups"], job.get("calibration"), part.criterion, job.accelerator, **options
    )
    return _origin(scores)


def _read_scores(job: Job) -> str:
    path = job.options["scores"]
    job.made["scores"] = scores = load_values(path, job["groups"])
    return f"{path}: {_origin(scores)}"


def _origin(values: Any) -> str:
    return f"{values.about.get('samples') or 'no'} images, criterion {values.about.get('criterion')}"


# ---- the slim network ---------------------------------------------------------------------------------------------


def _prune(job: Job) -> str:
    budget = job.settings.budget
    if not isinstance(budget, Budget):
        budget = Budget(**budget, table=job.get("table"))
    options = asdict(job.settings.prune)
    blocks = options.pop("blocks")
    images = job.get("recovery")  # where there are some, it will be refitted
    choice = choose_by_trial(job["base"], job["scores"], budget, images, groups=job["groups"], blocks=blocks, **options)
    args = {"shorter": choice.shorter, "base_args": job.source.base_args}
    result = sweep(job["base"], choice.values, [budget], **args, **options)[0]
    result = replace(result, report=choice.noted(result.report))
    student = Student(result.model, RunRecord.of_pruning(result, job.source.to_dict()), result=result)
    student.record.add_curves(choice.values, choice.groups, result.keep)
    if (loader := job.get("calibration")) is not None:  # recovery, where it follows, measures again
        student = student.measured(measure_loss(student.model, job["base"], loader, recovered=False))
    job.made["student"] = student
    figures = []
    for line in result.report.costs:
        if line.asked is not None:
            left, asked = 100 * line.counted / line.original, 100 * line.asked / line.original
            counted = line.unit in ("", line.label)  # "40.6 M MACs", but "12.3 ms"
            original = f"{human(line.original)} {line.unit}" if counted else human(line.original, line.unit)
            figures.append(f"{left:.1f} % of {original} (asked {asked:.4g} %)")
    return ", ".join(figures)


def _recover(job: Job) -> str:
    student, loader, images = job["student"], job["recovery"], job.settings.recover.images
    fitted = images_to_fit(loader, images) if job.settings.recover.refine else loader
    fits: list[LayerFit] = []

    def refit() -> None:
        fits.extend(
            recover_layers(
                student.model, job["base"], fitted, kept=student.kept, images=images, accelerator=job.accelerator
            )
        )

    loss, taken_back = recovered_if_better(student.model, job["base"], loader, refit)
    if job.is_main and taken_back:
        job.say(f"warning: {taken_back}")
    count = min(count_images(loader) or images, images)
    how = f"recovery with {count} images was taken back" if taken_back else f"recovered with {count} images"
    if job.settings.recover.refine:
        found = refine_steps(
            student.model, job["base"], loader, kept=student.kept, images=images, accelerator=job.accelerator
        )
        how += f" and refined by {found.kept} gradient steps without labels"
        loss = measure_loss(student.model, job["base"], loader, recovered=True)
    pruning = student.record.pruning
    if job.is_main and (warning := collapse_warning(job.source.name, loss, pruning.get("group_losses") or {})):
        job.say(f"warning: {warning}")
    student = student.then("recovered", note=how)
    job.made["student"] = student.measured(loss)
    return f"{count} images, {sum(not fit.skipped for fit in fits)} layers, {loss}"


def _finetune(job: Job) -> str:
    student, config = job["student"], job.finetune_config()
    distils = config.distillation.kd_weight or config.distillation.ikd_weight
    tuned = finetune(
        student.model, job["base"] if distils else None, job["training"], job.get("evaluation"), config,
        accelerator=job.accelerator, kept=student.kept, resume=job.resume,
        say=lambda line: job.say(f"finetune: {line}"),
    )  # fmt: skip
    if tuned.interrupted:
        again = job.words.get("resume", "the same command goes on from there")
        raise StoppedError(f"stopped after update {tuned.updates}; {again}")
    tuned.model.channel_config = student.model.channel_config  # an average of the student is another module
    student.record.add_finetuning(tuned.config, tuned)
    chosen, weights = tuned.config, tuned.config.distillation
    note = f"fine-tuned for {_count(tuned.epochs, 'epoch')}, {chosen.optimizer}, lr {chosen.lr:g}"
    note += f", ce {weights.label_weight:g}, kd {weights.kd_weight:g}, ikd {weights.ikd_weight:g}"
    job.made |= {"tuned": tuned, "student": student.then("fine-tuned", tuned.model, note)}
    return f"{_count(tuned.epochs, 'epoch')}, {_count(tuned.updates, 'update')}{_gain(tuned.evaluations)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _gain(rows: Sequence[dict[str, Any]]) -> str:
    """The first and the last evaluation of a run, in words."""
    if not rows:
        return ""
    if "top1" in rows[0]:
        return f", top-1 {rows[0]['top1']:.2f} → {rows[-1]['top1']:.2f} % on {rows[0]['samples']} images"
    return f", KL from the original {rows[0]['kl']:.3g} → {rows[-1]['kl']:.3g} on {rows[0]['samples']} images"


def _hold_out(job: Job) -> str:
    return f"{hold_out(job)} images to evaluate on, that nothing else sees"


# ---- what came out ------------------------------------------------------------------------------------------------


def _evaluate(job: Job) -> str:
    """Evaluate what has not been evaluated yet: the original, and the student as it is now."""
    rows = job.made["evaluations"] = list(job.get("evaluations") or ())
    known = len(rows)
    for what, model in job.versions():
        if what not in [row["what"] for row in rows[:known]]:
            rows.append({"what": what, **evaluate(model, job["evaluation"], job.accelerator)})
    figures = ", ".join(f"{row['what']} {row['top1']:.2f} %" for row in rows[known:])
    return f"top-1 {figures} on {rows[-1]['samples']} images"


def _timing(job: Job) -> str:
    """Time the original and the student in turns."""
    part, student = job.settings.latency, job["student"]
    times = compare_latency([job["base"], student.model], conditions=part.conditions()).latencies
    before, after = (latency.median for latency in times)
    about = {"batch_size": part.batch_size, "threads": part.threads or torch.get_num_threads()}
    student.record.latency = {"original": before, "pruned": after, **about, "device": job.device}
    return f"{before * 1e3:.1f} → {after * 1e3:.1f} ms at batch {part.batch_size}"


def _sweep(job: Job) -> str:
    """Accuracy against MACs: other budgets after recovery alone, and the original on smaller images as a baseline."""
    record = job["student"].record
    macs = next(line for line in record.pruning["costs"] if line["name"] == "macs")
    top1 = {row["what"]: row["top1"] for row in job["evaluations"]}
    asked = macs["asked"] / macs["original"]
    rows = [{"what": "original", "kind": "original", "macs": macs["original"], "top1": top1["original"]}]
    for what, name, kind in (
        ("fine-tuned", "fine-tuned", "fine-tuned"),
        ("recovered", f"{asked:.0%}", RECOVERED),
    ):
        if what in top1:
            rows.append({"what": name, "kind": kind, "macs": macs["counted"], "top1": top1[what]})
    for share in job.options["sweep"]["budgets"]:
        one = prune_again(job, Budget(macs=share))
        row = {"what": f"{share:.0%}", "kind": RECOVERED, "macs": one["student"].result.report.line("macs").counted}
        rows.append({**row, "top1": one["evaluations"][-1]["top1"]})
    rows += [smaller_images(job, side) for side in job.options["sweep"]["sides"]]
    record.sweep = rows
    return f"{len(rows)} points"


def prune_again(job: Job, budget: Budget, *more: str, **changes: Any) -> Job:
    """The same network, values and images with another budget: pruned, recovered, evaluated; returns the job of it.

    Args:
        more: names of further stages.
        changes: of the job, such as ``folder``.
    """
    names = ("base", "groups", "scores", "recovery", "evaluation")
    original = [row for row in job["evaluations"] if row["what"] == "original"]
    made = {**{name: job[name] for name in names}, "evaluations": original}
    settings = replace(job.settings, budget=budget)
    one = replace(job, settings=settings, made=made, **{"say": lambda line: None, **changes})
    return run_stages(stages("prune", "recover", "evaluate", *more), one)


def _save(job: Job) -> str:
    student = job["student"]
    record = student.record
    for row in job.get("evaluations") or ():
        record.add_evaluation(row["what"], {key: value for key, value in row.items() if key != "what"}, job.eval_name)
    record.command = job.command or record.command
    data = job.settings.data
    used = [] if data is None else [data.source, data.eval_source]
    said = {"datasets": list(dict.fromkeys(source for source in used if on_the_hub(source)))}
    base = ModelSource(**record.base) if record.base else None
    if base is not None and base.pretrained and base.weights is None and not base.is_folder:
        said["base_model"] = True  # timm's own weights: timm says where they come from
    job.made["saved"], _ = save_run(
        student.savable, job.folder, record=record, evaluation=_card_rows(job, student),
        notes=[*_history(student), *job.notes], **{**said, **job.saving},
    )  # fmt: skip
    return str(job["saved"])


def _history(student: Student) -> list[str]:
    """What the card says of how the student was made. A student from a folder has no result, which would say how its
    widths were chosen; its record does."""
    pruning = student.record.pruning
    if student.result is not None or not pruning.get("scores"):
        return student.record.notes
    told = {**pruning["scores"], "budget": (pruning.get("options") or {}).get("budget")}
    words = ", ".join(f"{key} {value}" for key, value in told.items() if value is not None)
    return [f"widths chosen by: {words}", *student.record.notes]


def _card_rows(job: Job, student: Student) -> list[dict[str, Any]]:
    """Accuracies of the student as it is, on whatever it was evaluated on, for the model card."""
    rows = student.record.evaluations
    original = next((row["top1"] for row in rows if row["what"] == "original"), None)
    found = []
    for row in rows:
        if row["what"] == student.what:
            about = {"dataset": row["data"], "split": job.eval_split if row["data"] == job.eval_name else None}
            metrics = {key: row.get(key) for key in ("top1", "top5", "samples")}
            found.append({**about, **metrics, "original_top1": original})
    return found


def _reload(job: Job) -> str:
    """Load what was saved as a user will, and evaluate it again."""
    loaded = timm.create_model(f"local-dir:{job['saved']}", pretrained=True).eval().to(job.device)
    again, before = evaluate(loaded, job["evaluation"], job.accelerator)["top1"], job["evaluations"][-1]["top1"]
    if again != before:
        raise KnapsackError(f"loaded back, the model has {again:.2f} % top-1, saved {before:.2f} %; please report this")
    return f"through timm.create_model, top-1 {again:.2f} % again"


def _report(job: Job) -> str:
    job.made["report"] = page = write_report(job["saved"])[0]
    return str(page)


# ---- the table ----------------------------------------------------------------------------------------------------

STAGES = {
    stage.name: stage
    for stage in (
        Stage("model", _model, makes=("base",), everywhere=True),
        Stage("data", _data, needs=("base",), makes=PURPOSES, everywhere=True),
        Stage("train", _train, needs=("base", "training"), makes=("base",), everywhere=True, bar=True),
        Stage("groups", _groups, needs=("base",), makes=("groups",), everywhere=True),
        Stage("latency", _latency, needs=("base",), makes=("table",), bar=True),
        Stage(
            "score", _score, needs=("base", "groups"), uses=("calibration",), makes=("scores",), everywhere=True,
            bar=True,
        ),
        Stage("read scores", _read_scores, needs=("groups",), makes=("scores",), everywhere=True),
        Stage("prune", _prune, needs=("base", "groups", "scores"), uses=("table",), makes=("student",)),
        Stage("recover", _recover, needs=("base", "student", "recovery"), makes=("student",), everywhere=True),
        Stage(
            "finetune", _finetune, needs=("base", "student", "training"), uses=("evaluation",),
            makes=("student", "tuned"), everywhere=True, bar=True, resumes=True,
        ),
        Stage(
            "evaluate", _evaluate, needs=("evaluation",), uses=("base", "student"), makes=("evaluations",),
            everywhere=True,
        ),
        Stage(
            "hold out", _hold_out, needs=("evaluation",), uses=("calibration", "recovery"), makes=("evaluation",),
            everywhere=True,
        ),
        Stage("timing", _timing, needs=("base", "student")),
        Stage("sweep", _sweep, needs=("base", "groups", "scores", "recovery", "evaluation", "student", "evaluations")),
        Stage("save", _save, needs=("student",), uses=("evaluations",), makes=("saved",)),
        Stage("reload", _reload, needs=("saved", "evaluation", "evaluations")),
        Stage("report", _report, needs=("saved",), makes=("report",)),
    )
}  # fmt: skip

SCORE = ("model", "data", "groups", "score")
PRUNE = ("model", "data", "groups", "score", "prune", "recover", "save")
RECOVER = ("data", "recover")  # of a student and its teacher that are given; then the first process saves
FINETUNE = ("finetune", "evaluate")  # likewise, and of loaders that are given
RUN = (*("model", "data", "groups", "latency", "score", "prune", "recover", "finetune", "evaluate", "save", "report"),)
REHEARSAL = ("data", "score", "prune", "finetune")  # of a network and groups that are given
QUICKSTART = (
    *("model", "data", "train", "evaluate", "groups", "score", "prune", "evaluate", "recover", "evaluate"),
    *("finetune", "evaluate", "timing", "sweep", "save", "reload", "report"),
)


def stages(*names: str, without: Sequence[str] = ()) -> list[Stage]:
    """The stages of these names, in this order.

    Example:
        >>> [stage.makes for stage in stages(*PRUNE, without=["recover"])][-2:]
        [('student',), ('saved',)]
    """
    return [STAGES[name] for name in names if name not in without]
