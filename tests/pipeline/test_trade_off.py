"""The trade-off: points are saved and not made twice, baselines are honest, evaluation sees what nothing else saw."""

import json
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from timm_knapsack.cli.app import main
from timm_knapsack.costs.latency.conditions import MeasuringConditions
from timm_knapsack.errors import BudgetError, DataError, KnapsackError
from timm_knapsack.images.loaders import create_loader
from timm_knapsack.pipeline import trade_off
from timm_knapsack.pipeline.baselines import RECOVERED, SMALLER, STOCK
from timm_knapsack.pipeline.recipe import DataPart, ModelPart, RecoverPart, ScorePart, Settings
from timm_knapsack.pipeline.stage import Job
from timm_knapsack.pipeline.trade_off import parse_shares, smallest_within, sweep_budgets
from timm_knapsack.reports.run_record import RunRecord

ORIGINAL = {"what": "original", "top1": 80.0}
NET = {"channels": (4, 4, 8), "num_classes": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images in one folder without splits, and the weights of a small network."""
    folder = tmp_path_factory.mktemp("trade_off")
    random = np.random.default_rng(0)
    for number in range(40):
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    save_file(timm.create_model("cifar_resnet20", **NET).state_dict(), folder / "net.safetensors")
    return folder


def new_job(place, folder, **changes) -> Job:
    settings = Settings(
        model=ModelPart("cifar_resnet20", False, str(place / "net.safetensors"), NET),
        data=DataPart(str(place / "images")),
        score=ScorePart(images=12, batch_size=6, labels="auto"),
        recover=RecoverPart(images=8, batch_size=8),
    )
    return Job(settings, folder=folder, say=changes.pop("say", lambda line: None), **changes)


def test_budgets_are_read():
    assert parse_shares("0.9:0.3:0.1") == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    for wrong in ("0.9:0.3", "0.3:0.9:0.1", "half", "1.5", "0.5:0.3:0"):
        with pytest.raises(BudgetError, match="budgets"):
            parse_shares(wrong)


def test_a_sweep_saves_its_points_and_goes_on_where_it_stopped(place, tmp_path):
    options = {"sides": [24], "baselines": [f"cifar_resnet20={place / 'net.safetensors'}"]}
    options["conditions"] = MeasuringConditions(max_seconds=0, threads=1)
    with pytest.raises(KnapsackError, match="does not fit"):  # the baseline has other channels: stopped half-way
        sweep_budgets(new_job(place, tmp_path), [0.8], **options)
    options["baselines"] = [str(tmp_path / "macs-0.8")]
    lines = []
    rows = sweep_budgets(new_job(place, tmp_path, say=lines.append), [0.8, 0.6], **options)
    assert [row["kind"] for row in rows] == ["original", RECOVERED, RECOVERED, SMALLER, STOCK]
    assert rows[4]["what"] == "macs-0.8" and rows[4]["top1"] == rows[1]["top1"]
    assert any("macs-0.8: there already" in line for line in lines)
    assert any("values.safetensors" in line for line in lines)  # scored once
    assert rows[1]["macs"] <= 0.8 * rows[0]["macs"] and rows[2]["macs"] <= 0.6 * rows[0]["macs"]
    assert rows[3]["macs"] < rows[0]["macs"] and rows[3]["what"] == "24 px"
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)
    again = timm.create_model(f"local-dir:{tmp_path / 'macs-0.6'}", pretrained=True)
    assert again.num_classes == 2
    assert RunRecord.load(tmp_path / "macs-0.6").sweep == json.loads((tmp_path / "sweep.json").read_text())["rows"]
    page = (tmp_path / "macs-0.6" / "report.html").read_text()
    assert "Accuracy against time" in page and (tmp_path / "accuracy_time.png").exists()
    other = new_job(place, tmp_path)
    other.source = type(other.source)("cifar_resnet20", False, None, NET)
    with pytest.raises(KnapsackError, match="holds a point of another network"):
        sweep_budgets(other, [0.8], **options)


def test_evaluation_sees_no_image_that_anything_else_saw(place, tmp_path):
    job = new_job(place, tmp_path)
    trade_off.start(job)
    seen = {index for name in ("calibration", "recovery") for index in job[name].dataset.indices.tolist()}
    held_out = set(job["evaluation"].dataset.indices.tolist())
    assert len(seen) == 12 and len(held_out) == 28 and not seen & held_out
    assert job["evaluations"][0]["samples"] == 28


def test_where_no_image_is_left_it_is_said(place, tmp_path):
    job = new_job(place, tmp_path)
    job.settings = replace(job.settings, recover=RecoverPart(images=100))
    with pytest.raises(DataError, match=r"all 40 images of .* none are left to evaluate on; give others"):
        trade_off.start(job)


def test_images_are_skipped_as_they_are_chosen(place):
    config = {"input_size": (3, 32, 32), "crop_pct": 1.0, "num_classes": 2}
    chosen = {n: set(create_loader(place / "images", config, limit=n).dataset.indices.tolist()) for n in (8, 12)}
    rest = create_loader(place / "images", config, skip=12, limit=5).dataset.indices.tolist()
    assert chosen[8] < chosen[12] and len(rest) == 5 and not chosen[12] & set(rest)
    with pytest.raises(DataError, match="has 40 images, and 40 of them are used elsewhere"):
        create_loader(place / "images", config, skip=40)


class Pretended:
    """Stands for a job that was pruned: top-1 falls with the budget as it is told."""

    def __init__(self, top1):
        self.top1 = top1

    def __call__(self, job, budget, *more, **changes):
        if budget.macs < 0.1:
            raise BudgetError("out of reach")
        rows = [ORIGINAL, {"what": "recovered", "top1": self.top1(budget.macs)}]
        return Job(job.settings, made={"evaluations": rows}, options={"share": budget.macs})


@pytest.mark.parametrize(("drop", "smallest"), [(1.0, 0.5), (0.0, 0.75), (100.0, 0.1)])
def test_the_smallest_network_within_a_drop_is_found(place, tmp_path, monkeypatch, drop, smallest):
    monkeypatch.setattr(trade_off, "start", lambda job: job.made.update(evaluations=[ORIGINAL]))
    falls = Pretended(lambda share: 80.0 if share >= 0.75 else 79.0 if share >= 0.5 else 20.0)
    monkeypatch.setattr(trade_off, "prune_again", falls)
    found, tries = smallest_within(new_job(place, tmp_path), drop)
    assert smallest <= found.options["share"] <= smallest + 0.02
    assert all(row["lost"] == 80 - row["top1"] for row in tries)


def test_where_nothing_is_small_enough_it_is_said(place, tmp_path, monkeypatch):
    monkeypatch.setattr(trade_off, "start", lambda job: job.made.update(evaluations=[ORIGINAL]))
    monkeypatch.setattr(trade_off, "prune_again", Pretended(lambda share: 70.0))
    with pytest.raises(BudgetError, match=r"no network loses at most 1 points of top-1 \(the least was 10.00\)"):
        smallest_within(new_job(place, tmp_path), 1.0)


def test_the_command_line_prunes_to_a_drop(place, tmp_path, capsys):
    network = ["cifar_resnet20", "--no-pretrained", "--weights", str(place / "net.safetensors")]
    network += ["--model-arg", "num_classes=2", "--model-arg", "channels=[4, 4, 8]"]
    images = ["--data", str(place / "images"), "--limit", "8", "--recover-images", "8"]
    with pytest.raises(SystemExit) as end:
        main(["prune", *network, *images, "--target-drop", "100", "--out", str(tmp_path / "out"), "--json"])
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    assert json.loads(said.out)["folder"] == str(tmp_path / "out") and "points lost" in said.err
    both = ["--budget", "macs=0.5", "--target-drop", "1"]
    for wrong, words in (([], "needs a budget"), (both, "exclude each other")):
        with pytest.raises(SystemExit) as end:
            main(["prune", *network, *images, *wrong])
        assert end.value.code == 2 and words in capsys.readouterr().err
