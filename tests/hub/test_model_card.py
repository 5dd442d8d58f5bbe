"""Model cards: made from the files, only with figures that were measured, with usage code that runs, and current."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from PIL import Image

import timm_knapsack as tk  # before timm
from timm_knapsack.hub.model_card import TEMPLATE, Evaluation, layer_widths, model_card, named_model_card

import timm  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def result():
    model = timm.create_model("cifar_resnet20").eval()
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="random")
    return tk.prune(model, scores=scores, budget=tk.Budget(macs=0.5), groups=groups, min_keep=2)


def test_a_plain_card_claims_nothing(result, tmp_path):
    folder = tk.save_pretrained(result, tmp_path / "half-net", verify=False)
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.license) == ("timm", "apache-2.0")
    assert card.data.pipeline_tag == "image-classification" and {"timm-knapsack", "pruning"} <= set(card.data.tags)
    assert card.data.base_model is None and card.data.eval_results is None and card.data.datasets is None
    assert "Accuracy" not in card.text and "measured" not in card.text and "![" not in card.text
    macs = result.report.line("macs")
    assert f"| MACs | {macs.original:,} | {macs.asked:,.0f} | {macs.counted:,} |" in card.text
    assert "- options: " in card.text and "min_keep `2`" in card.text and "criterion" in card.text
    text = card.text.split("## Use it")[1].split("```")[1]
    assert text.index("import timm_knapsack") < text.index("import timm\n")


def test_a_card_without_a_finite_bound_says_none(result, tmp_path):
    """Where the search ends without one, as with a budget of time, the bound is infinite: null in JSON."""
    unbounded = replace(result, report=replace(result.report, upper_bound=float("inf")))
    text = (tk.save_pretrained(unbounded, tmp_path / "unbounded", verify=False) / "README.md").read_text()
    assert "importance kept" in text and "upper bound" not in text
    text = (tk.save_pretrained(result, tmp_path / "bounded", verify=False) / "README.md").read_text()
    assert "upper bound" in text


def test_a_card_with_everything(result, tmp_path):
    measured = Evaluation("uoft-cs/cifar10", top1=91.234, top5=99.5, samples=10000, split="test", original_top1=92.5)
    folder = tk.save_pretrained(
        result,
        tmp_path / "net",
        evaluation=measured,
        datasets=["uoft-cs/cifar10"],
        base_model="me/teacher",
        license="mit",
        notes=["tuned for 3 epochs"],
        picture=lambda path: path.write_bytes(b"png"),
        verify=False,
    )
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.base_model, card.data.datasets) == ("mit", "me/teacher", ["uoft-cs/cifar10"])
    values = {(r.metric_type, r.metric_value, r.dataset_split) for r in card.data.eval_results}
    assert values == {("accuracy", 0.91234, "test"), ("top_5_accuracy", 0.995, "test")}
    assert "| uoft-cs/cifar10 test | 10,000 | 91.23 | 99.50 | 92.50 |" in card.text
    assert "![Channels kept in each layer](kept_channels.png)" in card.text and "- tuned for 3 epochs" in card.text
    on_hub = str(model_card(folder, "org/my-net"))
    assert "# my-net" in on_hub and 'create_model("hf-hub:org/my-net", pretrained=True)' in on_hub


def test_measured_time_appears_where_it_was_measured():
    from timm_knapsack.hub.model_card import _cost_table

    cost = {"name": "latency", "unit": "ms", "original": 10.0, "asked": 6.0, "counted": 5.5}
    assert _cost_table([cost]).splitlines()[0] == "|  | original | asked | counted | left |"
    table = _cost_table([{**cost, "original_measured": 11.0, "measured": 6.25}])
    assert "| ms | 10 | 6 | 5.5 | 11 | 6.25 | 55.0% |" in table


def test_usage_code_of_a_saved_folder_runs(result, tmp_path, monkeypatch, capsys):
    folder = tk.save_pretrained(result, tmp_path / "net", verify=False)
    Image.new("RGB", (40, 40)).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code, {})
    assert "topk(" in capsys.readouterr().out
    os.remove(folder / "model.safetensors")
    with pytest.raises(RuntimeError, match="No suitable checkpoints"):  # it did load that folder
        exec(code, {})


def test_layer_widths_agree_with_the_network():
    config = timm.create_model("resnet50_knapsack_2g").channel_config
    slim = dict(timm.create_model("resnet50_knapsack_2g").named_modules())
    layers = layer_widths(config)
    assert len(layers) == 54 and all(slim[name].weight.shape[0] == kept for name, _, kept in layers)


def test_named_cards():
    card = named_model_card("resnet50_knapsack_2g")
    assert "| MACs | 4,089,184,256 | 2,020,653,960 | 49.4% |" in str(card) and "pretrained=True" not in str(card)
    card = named_model_card("ecaresnet50d_knapsack_pruned")
    assert card.data.base_model == "timm/ecaresnet50d_pruned.miil_in1k" and "pretrained=True" in str(card)
    with pytest.raises(tk.ChannelConfigError, match="is no pruned model"):
        named_model_card("resnet50")


def test_the_generated_files_are_current(tmp_path):
    """channel_configs/*.json and model_cards/*.md are what benchmarks/named_models.py writes today."""
    from named_models import REPOSITORY, wanted_files

    files = wanted_files()
    assert len(files) == 12
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"run python benchmarks/named_models.py: {path.name} is stale"
    cards = {path.stem for path in (REPOSITORY / "model_cards").glob("*.md")} - {"TEMPLATE"}
    assert cards == {path.stem for path in files}
    assert (REPOSITORY / "model_cards" / "TEMPLATE.md").read_text() == TEMPLATE.read_text()
