"""The quickstart in a reduced setting: the same steps and the same promise, a smaller network."""

import timm
import torch

from timm_knapsack.pipeline import quickstart as module


def test_pruned_to_40_percent_it_is_as_good_as_the_base(tmp_path):
    args = {"channels": (8, 16, 32)}
    result = module.quickstart(
        tmp_path, model_args=args, base_epochs=6, tune_epochs=4, sweep=False, say=lambda text: None
    )
    top1, macs = result["top1"], result["macs"]
    assert top1["original"] > 90
    assert top1["fine-tuned"] >= top1["original"] - 0.5
    assert macs["counted"] <= macs["asked"] == 0.4 * macs["original"]
    namespace = {}
    exec(result["code"], namespace)  # the two lines that it prints
    assert namespace["model"](torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert "local-dir:" in result["code"] and timm.is_model("cifar_resnet20")
    assert (tmp_path / "base.safetensors").exists() and len(list(tmp_path.glob("images/train/*/*.png"))) == 1347
    page = (tmp_path / "model" / "report.html").read_text()
    assert "Asked, counted, measured" in page and "<script" not in page


def test_held_out_images_are_not_trained_on():
    (train, _), (test, labels) = module.load_digits()
    assert len(train) + len(test) == 1797 and len(test) == len(labels) == 450
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}
