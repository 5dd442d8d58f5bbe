"""The quickstart in a reduced setting: the same steps and the same promise, a smaller network."""

import re
from types import SimpleNamespace

import timm
import torch

from timm_knapsack.pipeline import quickstart as module


def test_every_step_does_its_part(tmp_path):
    """At 15 % of the MACs the cut alone guesses; recovery and fine-tuning each bring something back."""
    result = module.quickstart(
        tmp_path, model_args={"channels": (16, 32, 64)}, base_epochs=8, tune_epochs=4, round_to=1, sweep=False,
        say=lambda text: None,
    )  # fmt: skip
    top1, macs = result["top1"], result["macs"]
    assert list(top1) == ["original", "pruned", "recovered", "fine-tuned"]
    assert top1["original"] > 60
    assert top1["pruned"] + 10 < top1["recovered"] < top1["fine-tuned"] < top1["original"] + 5
    assert macs["counted"] <= macs["asked"] == 0.15 * macs["original"]
    head, *rows = result["table"]
    assert len(head) == 6 and [row[0] for row in rows][-1] == "change" and len(rows) == 5
    assert re.match(r"15% of the MACs take \d+% of the time here, at batch 16[.:]", result["speed"])
    namespace = {}
    exec(result["code"], namespace)  # the two lines that it prints
    assert namespace["model"](torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert "local-dir:" in result["code"] and timm.is_model("cifar_resnet8x2")
    assert (tmp_path / "base.safetensors").exists() and len(list(tmp_path.glob("images/train/*/*.png"))) == 2694
    card = (tmp_path / "model" / "README.md").read_text()
    assert "- recovered with 512 images\n- fine-tuned for 4 epochs, sgd" in card
    page = (tmp_path / "model" / "report.html").read_text()
    assert "Asked, counted, measured" in page and "<script" not in page


def test_it_says_where_the_time_falls_less_than_the_macs():
    macs = SimpleNamespace(counted=15, original=100)
    assert module._speed(macs, {"original": 1.0, "pruned": 0.29, "batch_size": 16}).startswith(
        "15% of the MACs take 29% of the time here, at batch 16: a CPU computes thin layers at a lower rate"
    )
    assert module._speed(macs, {"original": 1.0, "pruned": 0.16, "batch_size": 8}).endswith("at batch 8.")


def test_held_out_images_are_not_trained_on():
    (train, _), (test, labels) = module.load_digits()
    assert len(train) == 2 * 1347 and len(test) == len(labels) == 450
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}
