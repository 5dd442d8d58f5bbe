"""save_pretrained: what is loaded is what was saved, writes are atomic; and what push_to_hub refuses."""

import copy
import json
import os

import pytest
import torch
from torch import nn

import timm_knapsack as tk  # before timm
from timm_knapsack.errors import CheckpointError, HubError
from timm_knapsack.hub import saving as hub
from timm_knapsack.slim.tensor_files import write_tensors

import timm  # isort: skip
from safetensors import safe_open  # isort: skip


def prune_randomly(model: nn.Module, macs: float = 0.5, **kwargs):
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
    groups = tk.find_channel_groups(model.eval())
    scores = tk.taylor_scores(model, groups, criterion="random")
    return tk.prune(model, scores=scores, budget=tk.Budget(macs=macs), groups=groups, **kwargs)


@pytest.fixture(scope="module")
def result():
    return prune_randomly(timm.create_model("cifar_resnet20"))


def load(folder, **kwargs) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **kwargs).eval()


@torch.no_grad()
def assert_same(loaded: nn.Module, saved: nn.Module, shape=(2, 3, 32, 32)):
    state = saved.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded.float()(x), copy.deepcopy(saved).float().eval()(x))


# ---- loaded = saved ---------------------------------------------------------------------------------------------


def test_loaded_is_saved(result, tmp_path):
    folder = tk.save_pretrained(result, tmp_path / "net")
    assert sorted(path.name for path in folder.iterdir()) == sorted(set(hub.FILES) - {"kept_channels.png"})
    assert_same(load(folder), result.model)
    assert load(folder).channel_config == result.channel_config
    assert tk.ChannelConfig.load(folder / "channels.json") == result.channel_config
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "knapsack_pruned" and config["num_classes"] == 10
    assert "hf_hub_id" not in config["pretrained_cfg"] and "tag" not in config["pretrained_cfg"]
    assert config["timm_knapsack"]["costs"][0]["counted"] == tk.count_macs(result.model)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_comparison_can_fail(result, tmp_path):
    other = copy.deepcopy(result.model)
    other.linear.bias.data[0] += 1e-6
    with pytest.raises(AssertionError, match=r"linear\.bias"):
        assert_same(load(tk.save_pretrained(result, tmp_path / "net")), other)


def test_data_config_and_adaptation_survive(result, tmp_path):
    folder = tk.save_pretrained(result, tmp_path / "net")
    want = timm.data.resolve_model_data_config(timm.create_model("cifar_resnet20"))
    assert timm.data.resolve_model_data_config(load(folder)) == want
    assert load(folder, num_classes=3)(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    assert load(folder, in_chans=1)(torch.zeros(1, 1, 32, 32)).shape == (1, 10)
    features = load(folder, features_only=True)
    assert [o.shape[1] for o in features(torch.zeros(1, 3, 32, 32))] == features.feature_info.channels()


@pytest.mark.parametrize("in_chans", [1, 4])
@pytest.mark.parametrize("num_classes", [0, 7])
def test_other_inputs_and_heads(in_chans, num_classes, tmp_path):
    result = prune_randomly(timm.create_model("cifar_resnet20", in_chans=in_chans, num_classes=num_classes))
    loaded = load(tk.save_pretrained(result, tmp_path / "net"))
    assert_same(loaded, result.model, (2, in_chans, 32, 32))
    assert loaded.pretrained_cfg["first_conv"] == "conv1"


def test_heads_come_and_go(tmp_path):
    """Pruned without a head and given one, and the other way round."""
    headless = prune_randomly(timm.create_model("cifar_resnet20", num_classes=0)).model
    headless.reset_classifier(5)
    folder = tk.save_pretrained(headless, tmp_path / "given")
    assert_same(load(folder), headless)
    assert load(folder, num_classes=2)(torch.zeros(1, 3, 32, 32)).shape == (1, 2)

    model = prune_randomly(timm.create_model("cifar_resnet20")).model
    model.reset_classifier(0)
    folder = tk.save_pretrained(model, tmp_path / "taken")
    assert_same(load(folder), model)
    assert load(folder, num_classes=2).linear.in_features == model.num_features < 64


def test_channels_last_half_and_wrapped_models(result, tmp_path):
    model = copy.deepcopy(result.model).to(memory_format=torch.channels_last)
    assert_same(load(tk.save_pretrained(model, tmp_path / "last")), copy.deepcopy(result.model))
    half = copy.deepcopy(result.model).bfloat16()
    assert_same(load(tk.save_pretrained(half, tmp_path / "half")), half)

    class Wrapper(nn.Module):  # as DistributedDataParallel and ModelEma do
        def __init__(self, module):
            super().__init__()
            self.module = module

    for number, wrapped in enumerate(
        [torch.compile(result.model, backend="eager"), Wrapper(copy.deepcopy(result.model))]
    ):
        assert_same(load(tk.save_pretrained(wrapped, tmp_path / f"wrapped{number}")), result.model)


def test_fine_tuned_model_keeps_its_config(result, tmp_path):
    model = copy.deepcopy(result.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    folder = tk.save_pretrained(model, tmp_path / "net", report=result.report)
    assert_same(load(folder), model)
    made = json.loads((folder / "config.json").read_text())["timm_knapsack"]
    assert made["costs"][0]["asked"] == result.report.line("macs").asked


def test_tied_weights(tmp_path):
    @timm.models.register_model
    def tied_cifar_resnet(pretrained=False, **kwargs):
        model = timm.create_model("cifar_resnet20", **kwargs)
        model.layer1[1].conv1.weight = model.layer1[0].conv1.weight
        model.pretrained_cfg["architecture"] = "tied_cifar_resnet"
        return model

    result = prune_randomly(timm.create_model("tied_cifar_resnet"), macs=0.7)
    assert result.model.layer1[1].conv1.weight is result.model.layer1[0].conv1.weight
    loaded = load(tk.save_pretrained(result, tmp_path / "net"))
    assert_same(loaded, result.model)
    assert loaded.layer1[1].conv1.weight is loaded.layer1[0].conv1.weight


def test_saving_does_not_disturb_a_run(result, tmp_path):
    model = copy.deepcopy(result.model).train()
    before = torch.random.get_rng_state()
    tk.save_pretrained(model, tmp_path / "net")
    assert torch.equal(torch.random.get_rng_state(), before) and model.training


# ---- what is refused --------------------------------------------------------------------------------------------


def test_refusals(result, tmp_path):
    with pytest.raises(HubError, match=r"was not pruned by timm_knapsack.*save_for_hf"):
        tk.save_pretrained(timm.create_model("cifar_resnet20"), tmp_path / "net")
    with pytest.raises(HubError, match="expected a PruneResult or a pruned model, got str"):
        tk.save_pretrained("resnet18", tmp_path / "net")
    with torch.device("meta"):
        model = timm.create_model("resnet50_knapsack_2g")
    with pytest.raises(HubError, match="meta device"):
        tk.save_pretrained(model, tmp_path / "net")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("…")
    with pytest.raises(HubError, match="did not write"):
        tk.save_pretrained(result, tmp_path / "thesis")
    with pytest.raises(HubError, match="is a file"):
        tk.save_pretrained(result, tmp_path / "thesis" / "chapter1.tex")
    unknown = copy.deepcopy(result.model)
    unknown.channel_config = tk.ChannelConfig("MyNet", {})
    with pytest.raises(HubError, match=r"timm has no model 'MyNet'.*builder='package.module:function'.*register_model"):
        tk.save_pretrained(unknown, tmp_path / "net")
    with pytest.raises(HubError, match="the fields are dataset"):
        tk.save_pretrained(result, tmp_path / "net", evaluation={"accuracy": 1})
    assert not (tmp_path / "net").exists()


def test_base_arguments_that_were_not_said(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=2)
    with pytest.raises(CheckpointError, match=r"not give this model: blocks\.1\.norm1\.weight is missing.*base_args"):
        tk.save_pretrained(prune_randomly(model, 0.8), tmp_path / "net")
    said = prune_randomly(model, 0.8, base_args={"depth": 1})  # the size of the images is read off the model
    assert_same(load(tk.save_pretrained(said, tmp_path / "net")), said.model)


def test_a_model_changed_by_hand_is_found_out(result, tmp_path):
    changed = copy.deepcopy(result.model)
    changed.layer2[1].conv1.dilation, changed.layer2[1].conv1.padding = (2, 2), (2, 2)
    with pytest.raises(CheckpointError, match=r"layer2.1.conv1 is Conv2d.*dilation=\(2, 2\).*registered in timm"):
        tk.save_pretrained(changed, tmp_path / "net")
    pooled = prune_randomly(timm.create_model("cifar_resnet20", global_pool="max"))
    with pytest.raises(CheckpointError, match="pool"):
        tk.save_pretrained(pooled, tmp_path / "net")
    assert os.listdir(tmp_path) == []
    tk.save_pretrained(changed, tmp_path / "net", verify=False)


# ---- atomic -----------------------------------------------------------------------------------------------------


def test_an_earlier_save_is_replaced_and_other_files_stay(result, tmp_path):
    folder = tk.save_pretrained(result, tmp_path / "net", picture=lambda path: path.write_bytes(b"png"))
    (folder / "log.txt").write_text("mine")
    os.chmod(folder, 0o750)
    model = copy.deepcopy(result.model)
    model.linear.bias.data += 1
    tk.save_pretrained(model, folder)
    assert_same(load(folder), model)
    assert (folder / "log.txt").read_text() == "mine" and os.stat(folder).st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["net"]


@pytest.mark.parametrize("moment", ["weights", "config", "card", "verify", "swap", "swapped"])
def test_a_process_that_dies_leaves_a_whole_folder(result, tmp_path, moment, monkeypatch):
    folder = tk.save_pretrained(result, tmp_path / "net")
    model = copy.deepcopy(result.model)
    model.linear.bias.data += 1
    child = os.fork()
    if child == 0:
        import safetensors.torch

        from timm_knapsack.files import atomic

        def die(*_, **__):
            os._exit(9)

        exchange = atomic._exchange

        def exchange_and_die(new, old):
            exchange(new, old)
            die()

        def half(state, path, **_):
            path.write_bytes(b"half")
            die()

        places = {
            "weights": (safetensors.torch, "save_file", half),
            "config": (json, "dumps", die),
            "card": (hub, "model_card", die),
            "verify": (hub, "verify_saved", die),
            "swap": (atomic, "_exchange", die),
            "swapped": (atomic, "_exchange", exchange_and_die),
        }
        setattr(*places[moment])
        tk.save_pretrained(model, folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9  # it did die there
    assert_same(load(folder), model if moment == "swapped" else result.model)
    tk.save_pretrained(model, folder)  # and the next save works
    assert_same(load(folder), model)


def test_an_error_while_saving_leaves_the_old_folder_and_no_litter(result, tmp_path):
    folder = tk.save_pretrained(result, tmp_path / "net")

    def full_disk(path):
        raise OSError(28, "No space left on device")

    with pytest.raises(HubError, match="No space left on device; what stood there before is whole"):
        tk.save_pretrained(result, folder, picture=full_disk)
    assert_same(load(folder), result.model)
    assert os.listdir(tmp_path) == ["net"]


# ---- publishing without a network -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(result, tmp_path_factory):
    return tk.save_pretrained(result, tmp_path_factory.mktemp("saved") / "net")


def test_dry_run_sends_nothing(saved, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: pytest.fail("sent something"))
    plan = tk.push_to_hub(saved, "me/net", private=True, revision="dev", tag="v1", dry_run=True)
    assert plan.url is None and set(plan.files) == {"model.safetensors", "config.json", "channels.json", "README.md"}
    assert plan.files["model.safetensors"] == (saved / "model.safetensors").stat().st_size
    assert "would publish to me/net (private), branch dev, tag v1" in str(plan)


def test_publishing_refusals(saved, result, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(HubError, match="needs a Hub token, and none was found: run `hf auth login`"):
        tk.push_to_hub(saved, "me/net")
    with pytest.raises(HubError, match="is no repository id"):
        tk.push_to_hub(saved, "me/net/../x")
    with pytest.raises(HubError, match="there is no folder"):
        tk.push_to_hub(tmp_path / "nothing", "me/net")
    with pytest.raises(HubError, match="was not written by save_pretrained"):
        tk.push_to_hub(tmp_path, "me/net")
    with pytest.raises(HubError, match="'license' describes how a model is saved"):
        tk.push_to_hub(saved, "me/net", license="mit")
    assert "README.md" in tk.push_to_hub(result, "me/net", dry_run=True, license="mit").files


def test_one_bit_that_differs_after_loading_is_noticed(result, tmp_path, monkeypatch):
    """Too little for any comparison of outputs: the weights themselves are compared."""

    def with_one_bit_changed(path, state):
        first = state["conv1.weight"].clone()
        first.view(-1)[0] = torch.nextafter(first.view(-1)[0], torch.tensor(1e9))
        return write_tensors(path, {**state, "conv1.weight": first})

    monkeypatch.setattr(hub, "write_tensors", with_one_bit_changed)
    with pytest.raises(CheckpointError, match=r"conv1\.weight is not the same after loading"):
        tk.save_pretrained(result, tmp_path / "net")
    assert not (tmp_path / "net").exists()
