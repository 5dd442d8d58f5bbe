"""The notebook runs from its first cell to its last, which shows the report."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "prune_your_first_model.ipynb"


def run(folder: Path, change=lambda source: source):
    """The executed notebook, with less work to do: one epoch, and few images."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = change(cell.source.replace("EPOCHS = 10", "EPOCHS = 1").replace("limit=512", "limit=64"))
        cell.source = cell.source.replace("training=True, aug", "training=True, limit=64, aug")
        cell.source = cell.source.replace('split="test")', 'split="test", limit=32)')
    return NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()


def test_every_cell_runs_and_the_last_shows_the_report(tmp_path):
    notebook = run(tmp_path)
    shown = [
        "".join(output["data"].get("text/html", ""))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "data" in output
    ]
    assert sum("<table>" in html for html in shown) == 3, "groups, curves and result are tables"
    assert shown[-1].startswith("<div><iframe srcdoc=") and "Asked, counted, measured" in shown[-1]
    assert (tmp_path / "digits-small" / "model.safetensors").exists()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not any("IPython.display" in output["text"] for output in outputs if output.get("name") == "stderr")


def test_a_broken_cell_would_be_noticed(tmp_path):
    with pytest.raises(CellExecutionError, match="prun"):
        run(tmp_path, lambda source: "import timm_knapsack as tk\ntk.prun")


def test_it_is_stored_without_outputs():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
