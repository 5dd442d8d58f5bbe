"""What users wrap: each prunes, recovers, saves and loads, or is refused in one line that says what to do."""

import copy

import pytest
import torch
from torch import nn

import timm_knapsack as tk  # before timm
from timm_knapsack.errors import ChannelConfigError, KnapsackError
from timm_knapsack.slim.wrappers import bare

import timm  # isort: skip

HALF = tk.Budget(macs=0.5)


def network(**arguments) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("cifar_resnet8x2", channels=(8, 8, 16), **arguments).eval()


@pytest.fixture(scope="module")
def images():
    return list(torch.randn(2, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def plain(images):
    """The bare network pruned: what its wrappers must give, too."""
    return tk.prune(network(), images, budget=HALF, base_args={"channels": (8, 8, 16)})


@torch.no_grad()
def assert_equal(model: nn.Module, other: nn.Module, tolerance: float = 0.0):
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    a, b = (torch.utils._pytree.tree_leaves(net.eval().float()(x)) for net in (model, other))
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_the_comparison_can_fail(plain):
    other = copy.deepcopy(plain.model)
    other.linear.bias.data[0] += 1e-3
    with pytest.raises(AssertionError):
        assert_equal(plain.model, other)


# ---- wrappers that are taken off ----------------------------------------------------------------------------------


class TimmWrapperForImageClassification(nn.Module):
    """As transformers has it: the timm model under a name of its own, a dict as output."""

    def __init__(self, timm_model):
        super().__init__()
        self.timm_model = timm_model

    def forward(self, pixel_values, labels=None):
        return {"loss": None, "logits": self.timm_model(pixel_values)}


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=_never)
    return model


def _never(graph, inputs):
    raise AssertionError("the network that was given was compiled")


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "torch.compile": lambda model: torch.compile(model, backend=_never),
    "model.compile()": compiled_in_place,
    "TimmWrapper": TimmWrapperForImageClassification,
    "two of them": lambda model: nn.DataParallel(torch.compile(model, backend=_never)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_taken_off(wrapper, plain, images, tmp_path):
    wrapped = WRAPPERS[wrapper](network())
    result = tk.prune(wrapped, images, budget=HALF, base_args={"channels": (8, 8, 16)})
    assert type(result.model) is type(plain.model)
    assert_equal(result.model, plain.model)
    folder = tk.save_pretrained(WRAPPERS[wrapper](result.model), tmp_path / "net")
    assert_equal(timm.create_model(f"local-dir:{folder}", pretrained=True), plain.model)


def test_recovery_reaches_through_a_wrapper(images):
    model = network()
    groups = tk.find_channel_groups(nn.DataParallel(model), torch.zeros(1, 3, 16, 16))
    scores = tk.taylor_scores(nn.DataParallel(model), groups, criterion="magnitude")
    cut = tk.sweep(nn.DataParallel(model), scores, [HALF], groups=groups)[0].model
    wrapped, alone = nn.DataParallel(copy.deepcopy(cut)), copy.deepcopy(cut)
    tk.recover(wrapped, nn.DataParallel(model), images)
    tk.recover(alone, model, images)
    assert_equal(wrapped.module, alone)
    assert not torch.equal(cut.linear.bias, alone.linear.bias), "recovery changed something"


def test_distributed_data_parallel(plain):
    """It wants a process group, so that here it is built without its own __init__: what counts is its ``module``."""
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = plain.model
    assert bare(wrapped) is plain.model


# ---- half precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_as_it_was(dtype, images, tmp_path):
    model = network().to(dtype)
    result = tk.prune(model, images, budget=HALF, base_args={"channels": (8, 8, 16)})
    assert {t.dtype for t in result.model.parameters()} == {dtype} == {t.dtype for t in model.parameters()}
    full = tk.prune(copy.deepcopy(model).float(), images, budget=HALF)
    expected = full.model.to(dtype)
    assert all(torch.equal(t, expected.state_dict()[name]) for name, t in result.model.state_dict().items())

    before = result.model.linear.weight.clone()
    tk.recover(result.model, model, images[:1])
    assert result.model.linear.weight.dtype == dtype and not torch.equal(result.model.linear.weight, before)
    loaded = timm.create_model(f"local-dir:{tk.save_pretrained(result, tmp_path / 'net')}", pretrained=True)
    assert_equal(loaded, copy.deepcopy(result.model))
    labels = torch.zeros(8, dtype=torch.long)
    assert tk.evaluate(result.model, [(images[0], labels)])["samples"] == 8


# ---- features_only ------------------------------------------------------------------------------------------------

FEATURES = {
    "list": ("cifar_resnet8x2", {"channels": (8, 8, 16)}, {}),
    "some maps": ("cifar_resnet8x2", {"channels": (8, 8, 16)}, {"out_indices": (1, 2)}),
    "hook": ("cifar_resnet8x2", {"channels": (8, 8, 16)}, {"feature_cls": "hook"}),
    "dict": ("cifar_resnet8x2", {"channels": (8, 8, 16)}, {"feature_cls": "dict"}),
    "getter": (
        "vit_tiny_patch16_224",
        {"depth": 2, "embed_dim": 24, "num_heads": 2, "img_size": 16, "patch_size": 4},
        {"out_indices": (0, 1)},
    ),
    "a class of its own": ("mobilenetv3_small_050", {}, {"out_indices": (0, 1, 2)}),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_features_only(kind, images, tmp_path):
    name, base_args, arguments = FEATURES[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, features_only=True, **base_args, **arguments).eval()
    given = {key: value for key, value in base_args.items() if key != "img_size"}  # that one is read off the model
    example = torch.zeros(1, 3, 16, 16)
    result = tk.prune(model, images, budget=tk.Budget(macs=0.7), base_args=given, example_inputs=example)
    assert result.report.loss.kind == "squared error"
    assert tk.count_macs(result.model, (3, 16, 16)) <= 0.7 * tk.count_macs(model, (3, 16, 16))
    assert not tk.find_channel_groups(model, example).by_name.keys() & {"layer1.0.conv2"}, "maps keep their widths"
    folder = tk.save_pretrained(result, tmp_path / "net", example_inputs=example)
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert type(loaded) is type(model) and loaded.feature_info.channels() == model.feature_info.channels()
    assert_equal(loaded, result.model)
    assert loaded.channel_config == result.channel_config
    assert "maps of features" in (folder / "README.md").read_text()
    with pytest.raises(KnapsackError, match="gives no class scores"):
        tk.evaluate(loaded, [(images[0], torch.zeros(8, dtype=torch.long))])
    with pytest.raises(ChannelConfigError, match=r"was pruned as features_only with out_indices=.*these maps alone"):
        timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=False)


# ---- adapters, tied weights, outputs and inputs ---------------------------------------------------------------------


def test_peft_is_refused_with_the_way_out():
    class LoraModel(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def merge_and_unload(self):
            return self.model

    for call in (lambda m: tk.prune(m, [], budget=HALF), tk.find_channel_groups, lambda m: tk.recover(m, m, [])):
        with pytest.raises(KnapsackError, match=r"LoraModel is an adapter of PEFT .* model\.merge_and_unload\(\)"):
            call(LoraModel(network()))


def test_tied_weights(images, tmp_path):
    @timm.models.register_model
    def tied_cifar_resnet8(pretrained=False, **kwargs):
        model = timm.create_model("cifar_resnet8x2", channels=(8, 8, 16))
        model.layer1[0].conv2.weight = model.layer1[0].conv1.weight
        model.pretrained_cfg["architecture"] = "tied_cifar_resnet8"
        return model

    model = timm.create_model("tied_cifar_resnet8").eval()
    result = tk.prune(model, images, budget=tk.Budget(macs=0.6))
    block = result.model.layer1[0]
    assert block.conv2.weight is block.conv1.weight
    tk.recover(result.model, model, images)
    loaded = timm.create_model(f"local-dir:{tk.save_pretrained(result, tmp_path / 'net')}", pretrained=True)
    assert_equal(loaded, result.model)


def test_dict_outputs_are_class_scores_where_they_are_all_there_is(images):
    """KL of the logits alone; where there are maps beside them, those count too."""

    class Dicts(nn.Module):
        def __init__(self, maps: bool):
            super().__init__()
            self.net, self.maps = network(), maps

        def forward(self, x):
            features = self.net.forward_features(x)
            return {"logits": self.net.forward_head(features), **({"maps": features} if self.maps else {})}

    scores, both = (tk.prune(Dicts(maps), images, budget=HALF) for maps in (False, True))
    assert scores.report.loss.agreement is not None and scores.report.loss.kind == "KL divergence"
    assert both.report.loss.kind == "squared error"
    plain = tk.prune(network(), images, budget=HALF)
    assert_equal(scores.model.net, plain.model)
    labels = torch.zeros(8, dtype=torch.long)
    assert tk.evaluate(scores.model, [(images[0], labels)]) == tk.evaluate(plain.model, [(images[0], labels)])
    training = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images[0], labels), batch_size=8)
    config = tk.FinetuneConfig(epochs=1, progress=False, lr=1e-4)
    tk.finetune(scores.model, Dicts(False), training, None, config)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.body, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, a, b):
        return self.head(self.body((self.left(a) + self.right(b)).relu()).relu().mean((2, 3)))


def test_several_inputs_are_refused_with_the_way_out_and_that_works(images, tmp_path):
    model = TwoInputs()
    pairs = [(x, x.flip(3)) for x in images]
    with pytest.raises(KnapsackError, match=r"TwoInputs takes 2 inputs \(a, b\), and images are one; put it into a"):
        tk.prune(model, pairs, budget=HALF, example_inputs=pairs[0])
    groups = tk.find_channel_groups(model, pairs[0])
    scores = tk.taylor_scores(model, groups, pairs, loss_fn=lambda m, batch: m(*batch).square().mean())
    result = tk.prune(model, scores=scores, budget=HALF, groups=groups)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        result.model(*(x[:1] for x in pairs[0]))
    assert result.report.line("macs").counted == counter.get_total_flops() // 2 <= result.report.line("macs").asked
    folder = tk.save_pretrained(result, tmp_path / "net", builder=TwoInputs, example_inputs=pairs[0])
    loaded = tk.load_pretrained(folder, builder=TwoInputs)
    torch.testing.assert_close(loaded(*pairs[0]), result.model(*pairs[0]), rtol=0, atol=0)
