"""Cards of what the command line writes: they name the network, the data and the change, and nothing of this disk."""

import re
import shlex

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

import timm_knapsack as tk
from timm_knapsack import version
from timm_knapsack.cli import app as cli
from timm_knapsack.pipeline.digits import write_images
from timm_knapsack.pipeline.loaders import on_the_hub, public_name


def call(line: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(line))
    assert not end.value.code, line


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    """The card of a fine-tuned network."""
    folder = tmp_path_factory.mktemp("cards")
    for path in write_images(folder / "digits" / "images").glob("*/*"):
        for image in sorted(path.iterdir())[4:]:
            image.unlink()
    torch.manual_seed(0)
    save_file(timm.create_model("cifar_resnet20", channels=(4, 6, 8)).state_dict(), folder / "w.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        network = "cifar_resnet20 --model-arg channels=[4,6,8] --weights w.safetensors"
        call(f"prune {network} --data digits/images --budget macs=60% --batch-size 10 --out small --device cpu")
        call("finetune small --data digits/images --epochs 1 --batch-size 20 --out tuned --device cpu")
    return ModelCard.load(folder / "tuned" / "model" / "README.md"), folder


def test_it_names_network_data_and_change(card):
    text = card[0].text
    assert re.search(r"^# cifar_resnet20 at (59|60)% of its MACs$", text, re.MULTILINE)
    assert re.search(r"Top-1 on digits: [\d.]+ %, [+-][\d.]+ against the unpruned network\.", text)
    assert "| digits | 40 |" in text and "fine-tuned for 1 epoch," in text


def test_it_tells_the_steps_before_the_last_one(card):
    """Though the command that wrote it read the network from a folder."""
    history = card[0].text.partition("## How it was made")[2]
    steps = ["widths chosen by: criterion curves", "recovered with 40 images", "fine-tuned for 1 epoch"]
    places = [history.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), history


def test_nothing_of_this_disk_is_in_it(card):
    text, folder = str(card[0]), card[1]
    assert str(folder) not in text and "digits/images" not in text and "# model" not in text


def test_its_first_line_is_the_cure(card, monkeypatch):
    first = next(line for line in card[0].text.splitlines() if line and not line.startswith("#"))
    assert first.startswith("> ") and "Unknown model" in first and "import timm_knapsack" in first
    assert version.install_command() in first
    monkeypatch.setattr(version, "REPOSITORY", "https://example.org/timm-knapsack")
    assert version.install_command() == "pip install git+https://example.org/timm-knapsack"
    monkeypatch.setattr(version, "ON_PYPI", True)
    assert version.install_command() == "pip install timm-knapsack"


def test_public_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flowers" / "train").mkdir(parents=True)
    assert public_name("flowers/train") == public_name("flowers") == "flowers"
    assert public_name("uoft-cs/cifar10") == "uoft-cs/cifar10" and on_the_hub("uoft-cs/cifar10")
    assert not on_the_hub("flowers/train") and not on_the_hub("imagenet")


@pytest.mark.parametrize("network, size", [("test_vit", 96), ("test_vit", (64, 96)), ("vit_tiny_patch16_224", 64)])
def test_another_image_size_is_seen_without_being_told(network, size, tmp_path):
    model = timm.create_model(network, img_size=size, num_classes=4)
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="random")
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=0.6))
    assert result.channel_config.base_args["img_size"] == size
    loaded = timm.create_model(f"local-dir:{tk.save_pretrained(result, tmp_path / 'small')}", pretrained=True).eval()
    height, width = size if isinstance(size, tuple) else (size, size)
    image = torch.randn(1, 3, height, width)
    assert torch.allclose(loaded(image), result.model.eval()(image), atol=1e-5)
