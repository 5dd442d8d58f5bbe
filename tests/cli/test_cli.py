"""The command line as a user meets it: every verb's example, JSON, and one helpful line for each mistake."""

import errno
import json
import os
import re
import shlex

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from timm_knapsack.cli import app as cli
from timm_knapsack.costs.latency.table import LatencyTable
from timm_knapsack.errors import KnapsackError
from timm_knapsack.pipeline.recipe_run import KEPT
from timm_knapsack.pipeline.stages import STAGES

VERBS = (
    "doctor",
    "groups",
    "score",
    "latency",
    "prune",
    "recover",
    "finetune",
    "evaluate",
    "report",
    "publish",
    "run",
    "quickstart",
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A user's folder: images in ten classes, images without labels, weights of a small network, a pruned one."""
    folder = tmp_path_factory.mktemp("user")
    random = np.random.default_rng(0)
    for label in range(10):
        for split in ("train", "val"):
            (folder / "images" / split / f"c{label}").mkdir(parents=True)
            for i in range(2):
                image = Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8))
                image.save(folder / "images" / split / f"c{label}" / f"{i}.png")
    (folder / "flat").mkdir()
    for i in range(6):
        Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / "flat" / f"{i}.png")
    (folder / "empty").mkdir()
    torch.manual_seed(0)
    save_file(timm.create_model("cifar_resnet20").state_dict(), folder / "weights.safetensors")
    before = os.getcwd()
    os.chdir(folder)
    try:
        arguments = "--weights weights.safetensors --budget macs=0.5 --data images --out resnet20-half --device cpu"
        assert call(f"prune cifar_resnet20 {arguments} --batch-size 10 --limit 10")[0] == 0
        yield folder
    finally:
        os.chdir(before)


def call(line: str, capture=None):
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(line))
    out, err = capture.readouterr() if capture else ("", "")
    return end.value.code, out, err


@pytest.fixture
def user(work, capsys, monkeypatch):
    monkeypatch.chdir(work)
    capsys.readouterr()
    return lambda line: call(line, capsys)


def example_of(verb: str) -> str:
    command = next(c for c in cli.app.registered_commands if c.callback.__name__ == verb)
    return re.search(r"Example: timm-knapsack (.+)", command.callback.__doc__)[1]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(verb, user):
    code, out, err = user(f"{verb} --help")
    assert code == 0 and err == ""
    assert "Example: timm-knapsack " + verb in " ".join(out.split())


def test_help_examples_work(user, work, monkeypatch):
    """In the order of the verbs: later ones use what earlier ones wrote. Quickstart and run have tests of their own."""
    # seconds of waiting
    monkeypatch.setattr("timm_knapsack.costs.latency.table.measure_latency", lambda *a, **k: _latency())
    for verb in [verb for verb in VERBS if verb not in ("quickstart", "run")]:
        code, out, err = user(example_of(verb))
        assert code == 0, f"{verb}: {err}"
        assert out, verb
    model = timm.create_model(f"local-dir:{work}/resnet18-half", pretrained=True)
    assert sum(p.numel() for p in model.parameters()) < 11_689_512
    tuned = timm.create_model(f"local-dir:{work}/tuned/model", pretrained=True)
    assert tuned(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert (work / "resnet18-half" / "report.html").exists()


def _latency():
    from timm_knapsack.costs.latency.table import Latency

    return Latency.of([0.01, 0.011, 0.012])


@pytest.mark.parametrize(
    "line",
    [
        "groups cifar_resnet20",
        "score cifar_resnet20 --no-pretrained --criterion magnitude --out s.safetensors",
        "prune cifar_resnet20 --no-pretrained --criterion magnitude --budget macs=60% --out half",
        "recover resnet20-half --data images --limit 10 --batch-size 10 --device cpu",
        "evaluate resnet20-half --data images --device cpu",
        "report resnet20-half --out pictures",
        "publish resnet20-half me/resnet20-half --dry-run",
    ],
)
def test_json_parses_and_stands_alone(line, user):
    code, out, err = user(f"{line} --json")
    assert code == 0, err
    assert isinstance(json.loads(out), dict)


def test_stages_print_a_line_each_on_a_pipe_and_json_stands_alone(user):
    line = "--weights weights.safetensors --data images --limit 10 --recover-images 10 --batch-size 10 --device cpu"
    code, out, err = user(f"prune cifar_resnet20 {line} --budget macs=0.5 --out lines --json")
    assert code == 0 and json.loads(out)["folder"].endswith("lines")
    stages = [line.partition(":")[0] for line in err.splitlines() if "still running" not in line]
    assert stages == ["model", "data", "groups", "score", "prune", "recover", "save"]
    assert all(re.search(r"\d\.\d s$", line) for line in err.splitlines())


def test_blocks_go_and_the_folder_is_evaluated_reported_and_pruned_again(user, work, monkeypatch):
    monkeypatch.setattr("timm_knapsack.pipeline.trials.POWERS", (1.0,))  # fewer trials
    monkeypatch.setattr("timm_knapsack.pipeline.trials.Tryout.loss", lambda self, result: -len(result.report.blocks))
    save_file(timm.create_model("cifar_resnet8x2").state_dict(), work / "small.safetensors")
    line = "--weights small.safetensors --data images --limit 16 --recover-images 16 --batch-size 16 --device cpu"
    code, out, err = user(f"prune cifar_resnet8x2 {line} --blocks --budget macs=0.6 --out shorter")
    assert code == 0 and "blocks removed: layer1.0" in out, err
    removed = json.loads((work / "shorter" / "channels.json").read_text())["removed"]
    assert removed == {"layer1.0": "identity"}
    for then in ("evaluate shorter --data images --device cpu", "report shorter",
                 "recover shorter --data images --limit 10 --batch-size 10 --device cpu",
                 "prune shorter --criterion magnitude --budget macs=0.8 --out shorter-still"):  # fmt: skip
        code, out, err = user(then)
        assert code == 0, err
    assert "blocks removed" in (work / "shorter" / "report.html").read_text()
    assert json.loads((work / "shorter-still" / "channels.json").read_text())["removed"] == removed
    assert "needs --data FOLDER" in user("prune cifar_resnet20 --blocks --budget macs=0.5 --no-pretrained --out n")[2]


def test_the_help_of_run_names_every_stage(user):
    text = " ".join(user("run --help")[1].replace("│", " ").split())
    assert ", ".join(KEPT) in text


def test_one_scoring_pass_serves_several_budgets(user):
    assert user("score cifar_resnet20 --weights weights.safetensors --data images --limit 20 --device cpu")[0] == 0
    macs = {}
    for share in (0.7, 0.4):
        line = f"prune cifar_resnet20 --weights weights.safetensors --budget macs={share} --scores values.safetensors"
        code, out, _ = user(f"{line} --out b{share} --json")
        assert code == 0
        macs[share] = json.loads(out)["costs"][0]
    for share, cost in macs.items():
        assert cost["counted"] <= cost["asked"] == pytest.approx(share * cost["original"])


def test_images_without_labels_are_labelled_by_the_model(user):
    code, out, err = user(f"{P} --method paper --budget macs=0.5 --data flat --out f")
    assert code == 0
    assert "no labels" in err and "--labels model" in err
    assert "local-dir:" in out


def test_value_curves_need_no_labels_and_the_last_words_are_what_was_lost(user):
    code, out, err = user(f"{P} --budget macs=0.7 --data flat --out unlabelled")
    assert code == 0 and "no labels" not in err
    words = r"recovered: the same class as the original on [\d.]+% of the \d+ images given; KL divergence"
    assert re.search(words, " ".join(out.split()))  # lines are broken at the terminal's width
    code, out, err = user(f"{P} --budget macs=0.7 --data images --limit 10 --recover-images 10 --out labelled")
    assert code == 0 and "criterion curves" in err
    assert re.search(r"recovered: top-1 [\d.]+ % \(original [\d.]+ %\) on the 10 images given", " ".join(out.split()))
    code, out, err = user(f"{P} --method paper --budget macs=0.7 --data images --limit 10 --out published")
    assert code == 0 and "criterion abs" in err and "recover:" not in err
    words = r"not recovered: top-1 [\d.]+ % \(original [\d.]+ %\) on the 10 images given"
    assert re.search(words, " ".join(out.split()))
    assert "importance kept" not in out


def test_recovery_changes_the_weights_and_is_noted(user, work):
    plain = "prune cifar_resnet20 --weights weights.safetensors --budget macs=0.5 --data images --limit 10 --device cpu"
    assert user(f"{plain} --no-recover --batch-size 10 --out not-recovered")[0] == 0
    recovered, sliced = (load_file(work / name / "model.safetensors") for name in ("resnet20-half", "not-recovered"))
    assert recovered.keys() == sliced.keys()
    assert any(not torch.equal(recovered[name], sliced[name]) for name in sliced)
    assert "recovered with" in (work / "resnet20-half" / "README.md").read_text()


P = "prune cifar_resnet20 --weights weights.safetensors --device cpu"
MISTAKES = {
    "wrong model name": ("prune cifar_resnet2O --budget macs=0.5", "or cifar_resnet20"),
    "no images": (f"{P} --budget macs=0.5 --data empty", "no images in empty"),
    "no such folder": (f"{P} --budget macs=0.5 --data imagse", "there is no such local path"),
    "budget 0": (f"{P} --budget macs=0 --data images", "give a fraction above 0"),
    "budget 150%": (f"{P} --budget macs=150% --data images", "at most 100%"),
    "budget x%": (f"{P} --budget macs=x% --data images", "as 50%"),
    "folder that is there": (f"{P} --budget macs=0.5 --data images --out resnet20-half", "replace it with --overwrite"),
    "recover without images": ("recover resnet20-half", "--data FOLDER"),
    "recover what was not pruned": ("recover images --data images", "is no folder with a pruned model"),
    "budget 1.5": (f"{P} --budget macs=1.5 --data images", "a fraction is at most 1"),
    "class count mismatch": (
        "prune resnet18 --no-pretrained --method paper --budget macs=0.5 --data images --device cpu", "--labels model"),
    "unknown method": (f"{P} --budget macs=0.5 --method papers --data images", "is none of curves, paper"),
    "GPU asked but none": ("prune cifar_resnet20 --budget macs=0.5 --device cuda:9", "--device auto or cpu"),
    "misspelt option": (f"{P} --bugdet macs=0.5", "--budget"),
    "misspelt setting": ("finetune resnet20-half --data images --set epoch=2", "did you mean 'epochs'?"),
    "weights of another model": (
        "prune resnet18 --weights weights.safetensors --budget macs=0.5 --criterion magnitude", "does not fit"),
    "no data": ("evaluate resnet20-half", "--data FOLDER"),
    "not a pruned model": ("finetune images --data images", "is no folder with a pruned model"),
    "unreachable budget": (f"{P} --budget macs=0.0001 --data images --limit 10", "the smallest reachable is"),
    "budget without a cost": (f"{P} --budget 50% --data images", "such as macs=50%"),
    "no budget": (f"{P} --data images", "--budget macs=50%"),
    "limit 0": (f"{P} --budget macs=0.5 --data images --limit 0", "--limit 0: give an integer of at least 1"),
    "workers -1": (f"{P} --budget macs=0.5 --data images --workers -1", "--workers -1: give an integer"),
    "recovery on no images": (f"{P} --budget macs=0.5 --data images --recover-images 0", "--no-recover"),
    "no such scores": (f"{P} --budget macs=0.5 --data images --scores no.safetensors", "`timm-knapsack score` writes"),
    "folder of weights": ("prune cifar_resnet20 --weights images --budget macs=0.5 --data images", "is a folder"),
    "no such table": (f"{P} --budget latency=0.5 --latency-table no.json --data images", "`timm-knapsack latency`"),
    "no epochs": ("finetune resnet20-half --data images --epochs 0", "--epochs must be a whole number"),
    "trained onto itself": ("finetune resnet20-half --data images --out resnet20-half", "is the pruned model itself"),
    "unreachable teacher": (
        "finetune resnet20-half --data images --teacher-weights no.pth", "there is no weights file"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_answered_by_one_helpful_line(mistake, user):
    line, help_ = MISTAKES[mistake]
    check(user(line), help_)


@pytest.mark.parametrize("wrong", ["--ignore nothing.*", "--ignore *", "--min-keep 999", "--round-to 0"])
def test_limits_that_leave_nothing_to_choose_are_said_before_scoring(wrong, user):
    result = user(f"{P} --budget macs=0.5 --data images --limit 10 {wrong}")
    check(result, "matches no group" if "nothing" in wrong else "--round-to")
    assert "score:" not in result[2] and "groups:" not in result[2]


def test_a_budget_of_time_measures_its_table_first(user, monkeypatch):
    def measured(model, **options):
        raise KnapsackError(f"a table at batch {options['conditions'].batch_size}")

    monkeypatch.setattr(LatencyTable, "measure", measured)
    for amount in ("60%", "12ms"):
        result = user(f"{P} --budget latency={amount} --data images --limit 10 --out timed")
        check(result, "a table at batch 1")
        assert "groups:" in result[2] and "score:" not in result[2]


def check(result, help_: str, code: int = 2) -> None:
    found, out, err = result
    *before, last = err.splitlines()
    assert found == code, err
    assert out == "" and last.startswith("error: "), err
    assert all(line.startswith("note:") or line.partition(":")[0] in STAGES for line in before), err
    assert help_ in last and len(last) < 600


def test_missing_label_column(user, work, capsys):
    import datasets

    table = datasets.Dataset.from_dict({"picture": [str(work / "flat" / "0.png")] * 4, "answer": [0, 1, 2, 3]})
    table = table.cast_column("picture", datasets.Image())
    (work / "table").mkdir(exist_ok=True)
    table.to_parquet(work / "table" / "data.parquet")
    capsys.readouterr()  # its progress bar
    check(user("evaluate resnet20-half --data table --label-column labl --device cpu"), "answer")


def test_unreadable_folder(user, monkeypatch):
    listdir = os.listdir

    def refuse(path="."):
        if os.path.basename(str(path)) == "images":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)  # as root everything is readable
    check(user(f"{P} --budget macs=0.5 --data images"), "no permission to read the folder images")


def test_no_permission_to_write(user, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check(user(f"{P} --budget macs=0.5 --data images --out new"), "choose another folder")


def test_full_disk(user, monkeypatch):
    import safetensors.torch

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    line = "prune cifar_resnet20 --no-pretrained --criterion magnitude --budget macs=0.5 --out full"
    check(user(line), "the disk is full", code=1)


def test_images_without_labels_are_trained_on_by_the_teacher(user, work):
    code, _, err = user("finetune resnet20-half --data flat --out u --epochs 1 --batch-size 6 --device cpu")
    assert code == 0 and "finetune: 1 epoch" in err, err
    assert (work / "u" / "model" / "model.safetensors").exists()


def test_old_checkpoint(user, work):
    """An unfinished run's folder is neither overwritten nor resumed with other settings."""
    line = "finetune resnet20-half --data images --batch-size 10 --out old --device cpu"
    assert user(f"{line} --epochs 1")[0] == 0
    check(user(f"{line} --epochs 1"), "earlier run")
    # None: the run chooses its rate
    check(user(f"{line} --epochs 1 --lr 0.5 --resume"), "belongs to another run: config.lr is None in the checkpoint")
    state = work / "old" / "checkpoints" / "last" / "state.json"
    state.write_text(state.read_text().replace('"version": 1', '"version": 0'))
    check(user(f"{line} --epochs 1 --resume"), "has version 0")


def test_recipe_typo(user, work):
    (work / "r.yaml").write_text("name: a\nmodel: {name: resnet18}\ndata: {source: images}\nbuget: {macs: 0.5}\n")
    check(user("run r.yaml"), "unknown key 'buget'; did you mean 'budget'?")


def test_weights_that_can_not_be_downloaded(user, monkeypatch):
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def refuse(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(timm, "create_model", refuse)
    check(user("prune resnet18 --budget macs=0.5 --criterion magnitude"), "--weights FILE.safetensors")


def test_a_fault_of_ours_is_one_line_and_debug_shows_the_trace(user, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("timm_knapsack.channels.find_groups.find_channel_groups", broken)
    check(user("groups cifar_resnet20"), "--debug", code=1)
    code, _, err = user("groups cifar_resnet20 --debug")
    assert code == 1 and "Traceback" in err


def test_quickstart_ends_with_a_table_and_two_lines_of_python(user, monkeypatch):
    code = 'import timm, timm_knapsack\nmodel = timm.create_model("local-dir:q/model", pretrained=True)'
    canned = {"table": [["", "top-1"], ["recovered", "98.44 %"]], "report": "q/report.html", "code": code}
    canned["speed"] = "15% of the MACs take 34% of the time here"
    monkeypatch.setattr("timm_knapsack.pipeline.quickstart.quickstart", lambda folder, **options: canned)
    ended, out, err = user("quickstart --out q")
    assert ended == 0 and err == "" and "98.44 %" in out and canned["speed"] in out and out.rstrip().endswith(code)
    assert json.loads(user("quickstart --out q --json")[1])["report"] == "q/report.html"


def test_version(user):
    from timm_knapsack import __version__

    assert user("--version") == (0, f"timm-knapsack {__version__}\n", "")


def test_completion_knows_the_verbs():
    import subprocess
    import sys

    program = os.path.join(os.path.dirname(sys.executable), "timm-knapsack")
    asked = {"_TIMM_KNAPSACK_COMPLETE": "complete_bash", "COMP_WORDS": "timm-knapsack re", "COMP_CWORD": "1"}
    done = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == ["recover", "report"], done.stderr


def test_a_table_without_an_image_column(user, work, capsys):
    import datasets

    (work / "words").mkdir(exist_ok=True)
    datasets.Dataset.from_dict({"text": ["a"], "answer": [0]}).to_parquet(work / "words" / "data.parquet")
    capsys.readouterr()  # its progress bar
    check(user(f"{P} --budget macs=0.5 --data words"), "name one with --image-column NAME out of text, answer")
    (work / "words.yaml").write_text(
        "name: a\nmodel: {name: cifar_resnet20, pretrained: false}\ndata: {source: words}\nbudget: {macs: 50%}\n"
    )
    check(user("run words.yaml"), "name one with --set data.image_column=… out of text, answer")


def test_damaged_weights(user, work):
    import shutil

    shutil.copytree(work / "resnet20-half", work / "damaged", dirs_exist_ok=True)
    whole = (work / "damaged" / "model.safetensors").read_bytes()
    (work / "damaged" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    check(user("evaluate damaged --data images --device cpu"), "are damaged")
    (work / "half.safetensors").write_bytes(whole[:100])
    line = "prune cifar_resnet20 --weights half.safetensors --criterion magnitude --budget macs=0.5 --out d"
    check(user(line), "can't be read as weights")


def test_overwrite_replaces_an_earlier_model(user, work):
    line = "prune cifar_resnet20 --no-pretrained --criterion magnitude --out twice --budget"
    assert user(f"{line} macs=0.8")[0] == 0
    before = (work / "twice" / "channels.json").read_text()
    check(user(f"{line} macs=0.4"), "--overwrite")
    assert (work / "twice" / "channels.json").read_text() == before
    assert user(f"{line} macs=0.4 --overwrite")[0] == 0
    assert (work / "twice" / "channels.json").read_text() != before


def test_ctrl_c_says_how_to_go_on(user, monkeypatch):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("timm_knapsack.pipeline.stage.run_stages", stopped)
    line = "--data images --batch-size 10 --device cpu"
    assert user(f"finetune resnet20-half {line} --out c")[2] == (
        "stopped: to go on from the last checkpoint, the same command with --resume\n"
    )
    assert user(f"{P} {line} --budget macs=0.5 --out c2")[2] == "stopped\n"


def test_ctrl_c_ends_training_with_a_checkpoint(user, work, monkeypatch):
    import signal

    from timm_knapsack.training import finetuning

    update = finetuning._Run._update

    def interrupted(run, batches):
        if run.update == 1:
            signal.raise_signal(signal.SIGINT)
        return update(run, batches)

    line = "finetune resnet20-half --data images --batch-size 10 --epochs 2 --out ctrl-c --device cpu"
    monkeypatch.setattr(finetuning._Run, "_update", interrupted)
    code, _, err = user(line)
    assert code == 130 and "stopping after this step" in err and "go on with the same command and --resume" in err
    monkeypatch.undo()
    code, out, err = user(f"{line} --resume")
    assert code == 0 and "4 updates" in out, err


def test_a_long_stage_gives_signs_of_life_in_a_log():
    import threading

    from timm_knapsack.pipeline.progress import _say_now_and_then

    done, lines = threading.Event(), []

    def say(line):
        lines.append(line)
        if len(lines) == 3:
            done.set()

    _say_now_and_then("score", done, say, pauses=(0.01, 0.01))
    assert lines == ["score: still running, 0 s"] * 3


def test_limit_of_a_recipe_holds_for_everything_but_evaluation(work, monkeypatch):
    from timm_knapsack.pipeline.recipe import Recipe
    from timm_knapsack.pipeline.stage import Job

    monkeypatch.chdir(work)
    parts = {"score": {"criterion": "abs"}, "recover": {"images": 12}, "finetune": {"epochs": 1, "batch_size": 4}}
    network = {"name": "cifar_resnet20", "pretrained": False}
    recipe = {"name": "a", "model": network, "budget": {"macs": "50%"}, **parts}
    job = Job(Recipe.from_dict({**recipe, "data": {"source": "images", "limit": 8}}))
    job.made["base"] = job.source.load()
    counts = {p: len(job.open(p).dataset) for p in ("calibration", "recovery", "training", "evaluation")}
    assert counts == {"calibration": 8, "recovery": 8, "training": 8, "evaluation": 20}
