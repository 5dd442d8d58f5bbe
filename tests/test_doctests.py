"""Every ``>>>`` in the package runs and prints what it says.

An example may use the names that a user of the README has at that point: a model, images, its groups, scores, a pruned
result, a saved folder. They are made once, small; ``timm``, ``torch`` and the public names are there, too. Numbers that
are measured are written as ``...``.
"""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import timm
import torch

import timm_knapsack as tk

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples() -> dict[str, doctest.DocTest]:
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    for module in pkgutil.walk_packages(tk.__path__, "timm_knapsack."):
        if not module.name.endswith("__main__"):
            tests = finder.find(importlib.import_module(module.name), module.name)
            found.update({test.name.removeprefix("timm_knapsack."): test for test in tests if test.examples})
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("doctests")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    model = timm.create_model("cifar_resnet20").eval()
    loader = [(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))]
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, loader)
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=0.5))
    from timm_knapsack.reports.run_record import RunRecord

    RunRecord.of_pruning(result).save(tk.save_pretrained(result, folder / "resnet20-half"))
    own = {"model": model, "loader": loader, "groups": groups, "scores": scores, "result": result}
    return folder, {**{name: getattr(tk, name) for name in tk.__all__}, "tk": tk, "timm": timm, "torch": torch, **own}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, names, monkeypatch):
    folder, given = names
    monkeypatch.chdir(folder)
    test, report = EXAMPLES[name], []
    globs = {**given, **test.globs}
    test = doctest.DocTest(test.examples, globs, test.name, test.filename, test.lineno, test.docstring)
    assert doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append).failed == 0, "".join(report)


def test_examples_are_found_and_can_fail():
    assert {"slim.cutting.slice_model", "pipeline.prune.prune", "costs.latency.time_surface.Surface"} <= set(EXAMPLES)
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(optionflags=OPTIONS).run(wrong, out=lambda text: None).failed == 1
    skipped = [n for n, t in EXAMPLES.items() for e in t.examples if doctest.SKIP in e.options]
    assert set(skipped) <= {"hub.saving.push_to_hub"}, "only what needs the network"
