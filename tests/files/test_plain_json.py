"""One cleaner, one writer, one reader of JSON; one reader of versions."""

import json
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from timm_knapsack import __version__
from timm_knapsack.errors import CheckpointError, KnapsackError
from timm_knapsack.files.plain_json import plain, read_json, write_json
from timm_knapsack.files.versions import versions


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({1: {"a": (1, 2)}}, {"1": {"a": [1, 2]}}),
        (float("nan"), None),
        (float("-inf"), None),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([3]), 3),
        (torch.tensor(float("inf")), None),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({2, 1}), [1, 2]),
        (Path("a/b"), "a/b"),
        (torch.float16, "torch.float16"),
        ([True, None, "x"], [True, None, "x"]),
    ],
)
def test_plain(value, expected):
    result = plain(value)
    assert result == expected and type(result) is type(expected)
    json.dumps(result, allow_nan=False)


def test_exact_refuses_what_plain_would_change(tmp_path):
    path = write_json(tmp_path / "a.json", {"loss": 1.0})
    for wrong in (float("nan"), Path("x"), torch.tensor(1)):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"loss": wrong}, exact=True)
    assert json.loads(path.read_text()) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read: No such file"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a list of timm-knapsack"),
        ('{"format": "theirs", "version": 1}', "its format is not 'mine'"),
        ('{"format": "mine", "version": 3}', "has version 3, this timm_knapsack reads 1; write it again"),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_json(path, "a list", format="mine", version=1, error=CheckpointError, advice="write it again")
    assert isinstance(caught.value, KnapsackError) and str(path) in str(caught.value)


def test_versions_are_those_that_run():
    found = versions("timm-knapsack", "torch", "python", "no-such-package")
    number = torch.__version__.partition("+")[0]  # PyPI's wheel calls itself 2.13.0, and 2.13.0+cu130 once imported
    assert found.pop("torch") in (number, torch.__version__)
    assert found == {
        "timm-knapsack": __version__,
        "python": platform.python_version(),
        "no-such-package": "not installed",
    }
