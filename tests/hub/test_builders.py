"""Networks that are not timm's: saved with how their base is built, and loaded only where the caller names that."""

import json
import sys

import pytest
import torch
from torch import nn

import timm_knapsack as tk  # before timm
from timm_knapsack.errors import ChannelConfigError, CheckpointError, HubError

import timm  # isort: skip

MODULE = '''
from torch import nn
import timm

CALLS = []

def net(width=12, classes=5):
    CALLS.append(width)
    class Lora(nn.Module):
        """A hand-written adapter: its rank can be pruned as any other width."""
        def __init__(self, layer, rank=4):
            super().__init__()
            self.layer, self.down = layer, nn.Conv2d(layer.in_channels, rank, 3, padding=1, bias=False)
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)

        def forward(self, x):
            return self.layer(x) + self.up(self.down(x))

    return nn.Sequential(
        nn.BatchNorm2d(3), Lora(nn.Conv2d(3, width, 3, padding=1)), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
    )

def around_timm():
    return nn.Sequential(nn.BatchNorm2d(3), timm.create_model("cifar_resnet8x2", channels=(8, 8, 16)), nn.Linear(10, 4))

def broken():
    raise RuntimeError("no such file")

number = 3
'''


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A user's own module."""
    (tmp_path / "shop_of_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import shop_of_nets

    yield shop_of_nets
    del sys.modules["shop_of_nets"]


IMAGES = list(torch.randn(2, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0)))


def pruned(model: nn.Module, **arguments):
    return tk.prune(model.eval(), IMAGES, budget=tk.Budget(macs=0.5), **arguments)


@torch.no_grad()
def assert_same(loaded: nn.Module, saved: nn.Module):
    state = saved.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert torch.equal(loaded(IMAGES[0]), saved.eval()(IMAGES[0]))


@pytest.mark.parametrize("name", ["net", "around_timm"])
def test_loaded_is_saved(name, shop, tmp_path):
    builder = f"shop_of_nets:{name}"
    result = pruned(getattr(shop, name)())
    folder = tk.save_pretrained(result, tmp_path / "small", builder=builder)
    assert_same(tk.load_pretrained(folder, builder=builder), result.model)
    assert_same(tk.load_pretrained(f"local-dir:{folder}", builder=getattr(shop, name)), result.model)
    assert tk.ChannelConfig.load(folder / "channels.json").builder == builder
    card = (folder / "README.md").read_text()
    assert f'tk.load_pretrained("small", builder="{builder}")' in card and "timm.create_model" not in card
    assert "README.md" in tk.push_to_hub(folder, "me/small", dry_run=True).files
    again = pruned(tk.load_pretrained(folder, builder=builder))  # and on from there
    folder = tk.save_pretrained(again, tmp_path / "smaller")
    assert_same(tk.load_pretrained(folder, builder=builder), again.model)


def test_a_folder_alone_runs_nothing(shop, tmp_path):
    """Neither timm nor load_pretrained imports or calls what a folder names; the error says how to."""
    folder = tk.save_pretrained(pruned(shop.net()), tmp_path / "small", builder="shop_of_nets:net")
    calls = len(shop.CALLS)
    said = r"Sequential is not timm's: it was built by shop_of_nets:net. If you trust that code, load it with"
    with pytest.raises(ChannelConfigError, match=said):
        tk.load_pretrained(folder)
    with pytest.raises(ChannelConfigError, match=said):
        timm.create_model(f"local-dir:{folder}", pretrained=True)
    with pytest.raises(ChannelConfigError, match=said):
        tk.register_pruned_model(folder / "channels.json")
    for file in ("channels.json", "config.json"):  # a stranger's folder names what they like
        text = (folder / file).read_text().replace("shop_of_nets:net", "os:abort")
        (folder / file).write_text(text)
    with pytest.raises(ChannelConfigError, match="it was built by os:abort"):
        tk.load_pretrained(folder)
    assert len(shop.CALLS) == calls
    tk.load_pretrained(folder, builder=shop.net)  # the caller's word counts, not the folder's
    assert len(shop.CALLS) == calls + 1


def test_arguments_of_the_builder(shop, tmp_path):
    result = pruned(shop.net(classes=7))
    with pytest.raises(CheckpointError, match=r"shop_of_nets:net builds.*7\.weight is \[7, .*base_args"):
        tk.save_pretrained(result, tmp_path / "small", builder="shop_of_nets:net")
    result = pruned(shop.net(classes=7), base_args={"classes": 7})
    folder = tk.save_pretrained(result, tmp_path / "small", builder="shop_of_nets:net")
    assert_same(tk.load_pretrained(folder, builder="shop_of_nets:net"), result.model)


def test_refusals(shop, tmp_path):
    result = pruned(shop.net())
    for builder, said in {
        "shop_of_nets.net": "expected 'package.module:function'",
        "shop_of_nets:missing": "can't be had: AttributeError.*PYTHONPATH",
        "no_such_shop:net": "can't be had: ModuleNotFoundError.*PYTHONPATH",
        "shop_of_nets:number": "is a int, expected a function",
        "shop_of_nets:broken": "broken.* fails: RuntimeError: no such file",
        "builtins:dict": "returned a dict, expected an nn.Module",
    }.items():
        with pytest.raises(ChannelConfigError, match=said):
            tk.save_pretrained(result, tmp_path / "small", builder=builder)
    with pytest.raises(ChannelConfigError, match="can't be found again"):
        tk.save_pretrained(result, tmp_path / "small", builder=lambda: shop.net())
    with pytest.raises(HubError, match=r"timm has no model 'Sequential'.*builder='package.module:function'"):
        tk.save_pretrained(result, tmp_path / "small")
    assert not (tmp_path / "small").exists()
    folder = tk.save_pretrained(result, tmp_path / "small", builder="shop_of_nets:net")
    with pytest.raises(ChannelConfigError, match="num_classes=… has no meaning here"):
        tk.load_pretrained(folder, builder="shop_of_nets:net", num_classes=3)
    with pytest.raises((CheckpointError, ChannelConfigError), match=r"fit|more than"):
        tk.load_pretrained(folder, builder=lambda: shop.net(width=8))
    config = json.loads((folder / "channels.json").read_text())
    with pytest.raises(ChannelConfigError, match="builder is 5, expected 'package"):
        tk.ChannelConfig.from_dict({**config, "builder": 5})
    with pytest.raises(ChannelConfigError, match=r"features is .*, expected an object with class and out_indices"):
        tk.ChannelConfig.from_dict({**config, "features": {"class": "FeatureListNet"}})


def test_what_a_builder_changes_is_noticed(shop, tmp_path, monkeypatch):
    """The same weights in other code: outputs are compared."""
    result = pruned(shop.net())

    def other():
        model = shop.net()
        model[2] = nn.Tanh()
        return model

    monkeypatch.setattr(shop, "other", other, raising=False)
    with pytest.raises(CheckpointError, match="rebuilt from what shop_of_nets:other builds, this model gives other"):
        tk.save_pretrained(result, tmp_path / "small", builder="shop_of_nets:other")


def test_timm_networks_load_by_the_same_function(tmp_path):
    model = timm.create_model("cifar_resnet8x2", channels=(8, 8, 16)).eval()
    result = pruned(model, base_args={"channels": (8, 8, 16)})
    folder = tk.save_pretrained(result, tmp_path / "net")
    assert_same(tk.load_pretrained(folder), result.model)
    assert tk.load_pretrained(folder, num_classes=3)(IMAGES[0]).shape == (8, 3)
    with pytest.raises(ChannelConfigError, match="needs no builder"):
        tk.load_pretrained(folder, builder="torchvision.models:resnet18")
