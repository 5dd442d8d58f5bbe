"""Recipes: the strict schema, a dry run of every file, and stages that are skipped when nothing changed."""

import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from timm_knapsack.errors import RecipeError
from timm_knapsack.pipeline.recipe import Recipe
from timm_knapsack.pipeline.recipe_run import run_recipe
from timm_knapsack.pipeline.rehearsal import dry_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
ACCELERATE = sorted((Path(__file__).parents[2] / "recipes" / "accelerate").glob("*.yaml"))
SMALL = {"name": "a", "model": {"name": "resnet18"}, "data": {"source": "images"}, "budget": {"macs": 0.5}}


def test_there_is_a_recipe_for_each_row_of_the_papers_tables():
    names = [path.stem for path in RECIPES if not path.stem.endswith("_curves")]
    rows = {
        "resnet18_": 2,
        "resnet50_": 3,
        "resnet101_": 3,
        "efficientnet_b": 5,
        "ecaresnet50d_": 4,
        "ecaresnet101d_": 3,
    }
    rows |= {"resnet56_cifar": 2}
    for start, number in rows.items():
        assert sum(name.startswith(start) for name in names) == number, start
    assert len(names) == sum(rows.values())
    assert len(RECIPES) == 2 * len(names)  # each has a twin with the curves


@pytest.mark.parametrize("path", [p for p in RECIPES if not p.stem.endswith("_curves")], ids=lambda path: path.stem)
def test_a_row_keeps_the_papers_method_and_its_twin_differs_in_that_alone(path):
    paper, twin = Recipe.load(path), Recipe.load(path.with_name(f"{path.stem}_curves.yaml"))
    assert (paper.score.criterion, paper.recover.images) == ("abs", 0)
    assert twin.score.criterion == "curves" and twin.recover.images > 0
    for part in ("model", "data", "budget", "prune", "finetune", "paper", "seed"):
        assert getattr(twin, part) == getattr(paper, part), part


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_read_and_says_what_the_paper_reports(path):
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    assert recipe.paper["top1"] > 69
    if "macs" in recipe.budget:
        assert recipe.budget["macs"] == recipe.paper["macs"]
    inner = recipe.finetune["distillation"]["ikd_weight"]
    assert inner == 0 if "efficientnet" in path.stem else 20 <= inner <= 30


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dry_run(path):
    recipe = Recipe.load(path)
    facts = dry_run(recipe)
    macs = facts["costs"][0]
    assert macs["asked"] * 0.97 <= macs["counted"] <= macs["asked"]
    assert np.isfinite(facts["loss"])
    if "macs" in recipe.budget:
        assert macs["asked"] == recipe.budget["macs"]


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_the_config(path):
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(path)
    assert config.num_processes == {"gpu1": 1, "gpu8": 8, "nodes2": 16, "cpu": 1}[path.stem]
    assert config.num_machines == (2 if path.stem == "nodes2" else 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"buget": {}}, "unknown key 'buget'; did you mean 'budget'?"),
        ({"model": {"nam": "resnet18"}}, "unknown key 'nam' in model; did you mean 'name'?"),
        ({"model": {}}, "model.name is missing"),
        ({"model": {"name": 5}}, "model.name is 5, expected text"),
        ({"model": {"name": "a", "pretrained": "yes"}}, "model.pretrained is 'yes', expected true or false"),
        ({"score": {"images": "many"}}, "score.images is 'many', expected a whole number or nothing"),
        ({"budget": {"macs": 1.5}}, "budget macs=1.5"),
        ({"budget": {"macs": "half"}}, "budget macs='half' is not a number"),
        ({"budget": {}}, "at least one of macs, params, latency"),
        ({"finetune": {"epoch": 3}}, "unknown key 'epoch' in finetune; did you mean 'epochs'?"),
        ({"finetune": {"distillation": {"ikd_wieght": 3}}}, "did you mean 'ikd_weight'?"),
        ({"finetune": {"epochs": 0}}, "finetune: epochs must be a whole number at least 1"),
        ({"data": "images"}, "data is 'images', expected keys with values"),
        ({"name": "a/b"}, "no dot first"),
        ({"name": ".."}, "name is '..', expected"),
        ({"name": "."}, "no dot first"),
        ({"name": "a\x1b[31m"}, "no dot first"),
        ({"finetune": {"output_dir": "runs/../../home"}}, "can't lead upwards"),
    ],
)
def test_a_wrong_recipe_names_key_and_value(changes, words):
    with pytest.raises(RecipeError) as error:
        Recipe.from_dict({**SMALL, **changes}, "r.yaml")
    assert words in str(error.value) and str(error.value).startswith("r.yaml: ")


def test_numbers_in_the_way_people_write_them(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(SMALL).replace("macs: 0.5", "macs: 1.17e9"))
    assert Recipe.load(path).budget["macs"] == 1.17e9


def test_not_yaml_and_not_there(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("a: [1,\nb: 2")
    with pytest.raises(RecipeError, match="line 2: not YAML"):
        Recipe.load(path)
    with pytest.raises(RecipeError, match=r"there is no recipe .*did you mean .*r\.yaml"):
        Recipe.load(tmp_path / "q.yaml")


BILLION_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BILLION_LAUGHS, r"line 2: the alias \*a is not allowed"),
        ("a: &a [*a]", r"the alias \*a is not allowed"),
        ("name: a\nmodel: {name: b}\nname: c", "line 3: the key 'name' stands twice"),
        ("model: {name: a, name: b}", "line 1: the key 'name' stands twice"),
        ("1: a\n1.0: b", "stands twice"),
        ("x: " + "a" * 20_000_000, "larger than 0.0625 MiB"),
        ("[" * 30_000, "nested too deeply|not YAML"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: 2024-13-45", "a value can't be read"),
        ("a: \x07", "not YAML"),
        ("? [a]\n: b", "unhashable"),
        ("name: a\nmodel: {name: 'b\x85c'}", "data is missing"),
        ("name: a\nmodel: {name: b}\ndata: {source: c}", "budget is missing"),
    ],
    ids=lambda value: value[:20],
)
def test_a_recipe_from_a_stranger_is_refused_at_once(tmp_path, text, words):
    (tmp_path / "r.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(RecipeError, match=words) as error:
        Recipe.load(tmp_path / "r.yaml")
    assert time.process_time() - began < 1
    assert "\n" not in str(error.value) and len(str(error.value)) <= 1000


def test_settings_win_over_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    assert Recipe.load(path, {"data.source": "elsewhere", "score.criterion": "sum"}).score.criterion == "sum"
    with pytest.raises(RecipeError, match="did you mean 'source'"):
        Recipe.load(path, {"data.sorce": "elsewhere"})


@pytest.fixture
def small(tmp_path):
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(2):
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    torch.manual_seed(0)
    save_file(timm.create_model("cifar_resnet20", num_classes=2).state_dict(), tmp_path / "w.safetensors")
    return {
        "name": "small",
        "model": {"name": "cifar_resnet20", "weights": str(tmp_path / "w.safetensors"), "args": {"num_classes": 2}},
        "data": {"source": str(tmp_path / "images")},
        "budget": {"macs": 0.5},
        "recover": {"images": 8},
        "finetune": {"epochs": 1, "batch_size": 4, "lr": 0.01, "ikd_init": "selection", "progress": False},
    }


def test_unchanged_stages_are_skipped(small, tmp_path):
    def states(data, **options):
        result = run_recipe(Recipe.from_dict(data), tmp_path / "run", **options)
        assert Path(result["report"]).exists()
        return [stage for stage, state in result["stages"].items() if state == "done"]

    every = ["score", "prune", "recover", "finetune", "evaluate", "save", "report"]
    assert states(small) == every
    assert states(small) == []
    assert states({**small, "about": "other words"}) == ["save", "report"]
    assert states(small, from_stage="evaluate") == every[4:]
    (tmp_path / "run" / "finetune" / "stage.json").unlink()  # as if it had been interrupted
    assert states(small) == ["finetune"]  # the same inputs give the same result: what follows stands
    (tmp_path / "run" / "save" / "stage.json").unlink()
    assert states(small) == ["save", "report"]  # a new folder needs its report again
    assert states({**small, "budget": {"macs": 0.6}}) == every[1:]
    assert timm.create_model(f"local-dir:{tmp_path}/run/save/model", pretrained=True).num_classes == 2
    with pytest.raises(RecipeError, match="there are latency, score"):
        states(small, from_stage="scoring")
