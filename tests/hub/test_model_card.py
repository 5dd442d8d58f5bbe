"""Model cards: made from the files, only with figures that were measured, with usage code that runs, and current."""

import ast
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


EVIL = "<script>alert(1)</script> [x](javascript:alert(1)) `a` **b** | c\n# heading\n```\n<!-- {{ 7 * 7 }} \x1b[31m"


def test_text_from_users_is_shown_and_never_becomes_markup_or_code(result, tmp_path):
    """Rendered by a Markdown library: no element that the template does not have, and the words are all there."""
    from markdown_it import MarkdownIt

    measured = Evaluation(EVIL, top1=91.0, samples=100, split="a|b")
    name = 'net"); import os; os.system("true") #`|<b>\n```\nimport evil'
    with_notes = {"notes": [EVIL, "# no heading", "1. no list", "plain words"], "datasets": [EVIL], "base_model": EVIL}
    folder = tk.save_pretrained(result, tmp_path / name, evaluation=measured, verify=False, **with_notes)
    card = ModelCard.load(folder / "README.md")
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(card.text)
    inline = [child for token in tokens for child in token.children or ()]
    plain = MarkdownIt("gfm-like", {"linkify": False}).parse(
        ModelCard.load(tk.save_pretrained(result, tmp_path / "plain", verify=False) / "README.md").text
    )
    html = [token.content.strip() for token in tokens if token.type == "html_block"]
    assert html == [token.content.strip() for token in plain if token.type == "html_block"]  # <details> of the template
    assert not [child for child in inline if child.type in ("html_inline", "strong_open", "image")]
    links = [child.attrs["href"] for child in inline if child.type == "link_open"]
    assert links == ["https://arxiv.org/abs/2002.08258"]
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[1:] == ["Use it", "Size", "Accuracy", "Kept channels", "How it was made"]
    fences = [token.content for token in tokens if token.type == "fence"]
    assert len(fences) == 1
    shown = "".join(child.content for child in inline if child.type in ("text", "code_inline"))
    assert "<script>alert(1)</script> [x](javascript:alert(1))" in shown and "{{ 7 * 7 }} \\x1b[31m" in shown
    assert "# no heading" in shown and "plain words" in shown
    calls = [node.func for node in ast.walk(ast.parse(fences[0])) if isinstance(node, ast.Call)]
    assert {ast.unparse(call).rpartition(".")[2] for call in calls} == {
        *("create_model", "eval", "create_transform", "resolve_model_data_config", "no_grad", "model", "transform"),
        *("open", "convert", "print", "topk", "softmax"),
    }
    texts = [node.value for node in ast.walk(ast.parse(fences[0])) if isinstance(node, ast.Constant)]
    assert f"local-dir:{name}" in texts
