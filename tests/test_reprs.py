"""What a notebook and a Python prompt show of each object: a line, or a table; never thousands of characters."""

import re
from html.parser import HTMLParser

import pytest
import timm
import torch

import timm_knapsack as tk
from timm_knapsack.human_tables import html_table


@pytest.fixture(scope="module")
def things():
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20")
    loader = [(torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))]
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, loader)
    curves = tk.value_curves(model, groups, loader)
    result = tk.prune(model, loader, scores=scores, groups=groups, recover=False, budget=tk.Budget(macs=0.6))
    config = result.channel_config
    return {
        "groups": groups, "scores": scores, "curves": curves, "result": result, "report": result.report,
        "config": config, "group": groups[0],
    }  # fmt: skip


SAYS = {
    "groups": r"ChannelGroups\(14 groups, 400 units, 1 frozen, verified: values\)",
    "scores": r"Scores\(14 groups, 400 units, abs\)",
    "curves": r"ValueCurves\(14 groups of cifar_resnet20, 8 images\)",
    "result": r"PruneResult\(cifar_resnet20: macs [\d.]+%, params [\d.]+% left; not recovered: top-1 .*\)",
    "report": r"PruneReport\(cifar_resnet20: macs [\d.]+%, params [\d.]+% left\)",
    "config": r"ChannelConfig\('cifar_resnet20', \d+ tensors resized\)",
    "group": r"ChannelGroup\('conv1', size=16, slices=\d+\)",
}


@pytest.mark.parametrize("name", SAYS)
def test_a_repr_is_one_short_line(name, things):
    assert re.fullmatch(SAYS[name], repr(things[name])), repr(things[name])
    assert len(repr(things[name])) < 150


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.rows = [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["groups", "scores", "curves", "result", "report"])
def test_a_notebook_shows_a_table(name, things):
    html, tags = things[name]._repr_html_(), Tags()
    tags.feed(html)
    assert tags.open == [] and 3 <= tags.rows < 60 and len(html) < 12_000


def test_figures_are_in_human_units(things):
    for text in (str(things["report"]), things["report"]._repr_html_()):
        assert "40.6 M" in text and "e+" not in text
    assert "40.6 M MACs" in things["groups"]._repr_html_()


def test_a_long_table_is_cut_and_text_is_escaped():
    html = html_table("a", ["x", "y"], [["<b>", n] for n in range(100)], most=3)
    assert html.count("<tr>") == 5 and "… and 97 more" in html and "<b>" not in html
