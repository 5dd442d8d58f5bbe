"""The table of stages, the lists made of it, and what a run prints."""

import re
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import load_file

from timm_knapsack.errors import KnapsackError
from timm_knapsack.pipeline import stages as table
from timm_knapsack.pipeline.recipe import DataPart, ModelPart, PrunePart, RecoverPart, ScorePart, Settings
from timm_knapsack.pipeline.recipe_run import IN_MEMORY, KEPT, stages_before
from timm_knapsack.pipeline.stage import Job, check_order, run_stages
from timm_knapsack.pipeline.stages import STAGES, stages
from timm_knapsack.pruning.budget import Budget

LISTS = {  # list: what is there before it starts
    "SCORE": (),
    "PRUNE": (),
    "RECOVER": ("base", "student"),
    "FINETUNE": ("base", "student", "training", "evaluation"),
    "RUN": (),
    "REHEARSAL": ("base", "groups"),
    "QUICKSTART": (),
}


def test_every_list_is_tested():
    lists = {name for name, value in vars(table).items() if name.isupper() and isinstance(value, tuple)}
    assert lists - {"PURPOSES"} == set(LISTS)


@pytest.mark.parametrize("name", LISTS)
def test_each_need_is_made_by_an_earlier_stage(name):
    check_order(stages(*getattr(table, name)), LISTS[name])  # a name that is not in the table is a KeyError


def test_a_wrong_order_is_found():
    with pytest.raises(KnapsackError, match="'prune' needs scores, which no stage before it makes"):
        check_order(stages("model", "groups", "prune", "score"))
    with pytest.raises(KnapsackError, match="'recover' needs recovery"):
        check_order(stages("model", "groups", "score", "prune", "recover"))


def test_what_stages_make_is_taken_by_another_or_is_an_end():
    taken = {name for stage in STAGES.values() for name in stage.needs + stage.uses}
    made = {name for stage in STAGES.values() for name in stage.makes}
    assert taken <= made
    assert made - taken == {"tuned", "report"}


def test_a_stage_on_disk_depends_on_those_that_make_what_it_takes():
    assert {name: stages_before(name) for name in KEPT} == {
        "latency": [], "score": [], "prune": ["latency", "score"], "recover": ["prune"], "finetune": ["recover"],
        "evaluate": ["finetune"], "save": ["evaluate"], "report": ["save"],
    }  # fmt: skip
    assert not set(IN_MEMORY) & set(KEPT)


@pytest.fixture
def job(tmp_path):
    """A job on arrays: ten noisy images in two classes."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (10, 32, 32, 3), generator=random, dtype=torch.uint8).numpy()
    settings = Settings(
        model=ModelPart("cifar_resnet20", pretrained=False, args={"num_classes": 2, "channels": (8, 16, 32)}),
        data=DataPart(source=(images, [0, 1] * 5)),
        budget=Budget(macs=0.5),
        score=ScorePart(images=8, batch_size=4),
        prune=PrunePart(round_to=2),
        recover=RecoverPart(images=6, batch_size=3),
    )
    lines = []
    made = Job(settings, folder=tmp_path / "model", data_name="noise", say=lines.append)
    return made, lines


def test_the_prune_list_scores_prunes_recovers_and_saves(job):
    job, lines = job
    run_stages(stages(*table.PRUNE), job)
    assert [line.partition(":")[0] for line in lines] == list(table.PRUNE)  # one line for each stage
    assert re.fullmatch(r"data: 8 images for calibration, 6 images for recovery, [\d.]+ s", lines[1])
    assert re.fullmatch(r"score: 8 images, criterion curves, [\d.]+ s", lines[3])
    assert re.fullmatch(r"prune: (4\d|50)\.\d % of 10\.\d M MACs \(asked 50 %\), [\d.]+ s", lines[4])
    assert re.fullmatch(
        r"recover: 6 images, \d+ layers, top-1 [\d.]+ % \(original [\d.]+ %\) on the 6 images given, [\d.]+ s", lines[5]
    )
    assert "training" not in job.made and "evaluation" not in job.made  # nobody takes them: not opened
    student = job["student"]
    assert student.what == "recovered" and student.record.base["name"] == "cifar_resnet20"
    assert all(len(index) % 2 == 0 for index in student.kept.values())
    loaded = timm.create_model(f"local-dir:{job['saved']}", pretrained=True)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), student.model.parameters(), strict=True))
    assert "recovered with 6 images" in (job["saved"] / "README.md").read_text()


def test_recovery_can_be_left_out(job):
    job, lines = job
    run_stages(stages(*table.PRUNE, without=["recover"]), job)
    assert job["student"].what == "pruned" and not any(line.startswith("recover") for line in lines)
    weights = load_file(job["saved"] / "model.safetensors")
    assert any(weights[name].shape != p.shape for name, p in job["base"].named_parameters())


def test_evaluate_takes_only_what_is_new(job):
    job, lines = job
    run_stages(stages("model", "data", "evaluate", "groups", "score", "prune", "evaluate"), job)
    assert [row["what"] for row in job["evaluations"]] == ["original", "pruned"]
    assert "original" in lines[2] and "original" not in lines[-1]


def test_a_criterion_without_data_opens_no_images(job):
    job, lines = job
    job.settings = replace(job.settings, score=ScorePart(criterion="magnitude"))
    run_stages(stages(*table.SCORE), job)
    assert "calibration" not in job.made
    assert lines[1].startswith("data: no images") and lines[3].startswith("score: no images, criterion magnitude")


def test_what_is_missing_is_named(job):
    job, _ = job
    with pytest.raises(KnapsackError, match="no scores in this job"):
        job["scores"]


LABELS = {"classes": ([0, 1] * 5, True), "other classes": ([0, 7] * 5, False), "none": (None, False)}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_the_model_tell_the_top1_that_was_lost_and_no_others(job, kind):
    """Images without a label have -1, which no network predicts: their top-1 would be 0 before and after."""
    (job, _), (labels, counts) = job, LABELS[kind]
    images, _ = job.settings.data.source
    data = replace(job.settings.data, source=images if labels is None else (images, labels))
    job.settings = replace(job.settings, data=data)
    run_stages(stages(*table.PRUNE, without=["save"]), job)
    loss = job["student"].record.pruning["loss"]
    assert (loss["top1_before"] is not None) == counts
    if counts:
        seen = torch.cat([y for _, y in job["recovery"]])
        with torch.no_grad():
            predicted = torch.cat([job["base"].eval()(x).argmax(1) for x, _ in job["recovery"]])
        assert set(seen.tolist()) <= {0, 1} and loss["top1_before"] == pytest.approx(
            100 * float((predicted == seen).sum()) / 6
        )
