"""Which channels were kept is saved with the model, survives a second pruning, and serves recovery and distillation."""

import json

import pytest
import torch

import timm_knapsack as tk  # before timm
from timm_knapsack.errors import KeepError, KnapsackError
from timm_knapsack.slim.index_ranges import ranges_text, read_ranges
from timm_knapsack.slim.kept_channels import kept_of
from timm_knapsack.training.distillation import DistillationModule

import timm  # isort: skip


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return timm.create_model("cifar_resnet20").eval()


def cut(model, macs: float = 0.6, backwards: bool = False):
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="random")
    if backwards:
        scores = {name: values.flip(0) for name, values in scores.items()}
    return tk.prune(model, scores=scores, budget=tk.Budget(macs=macs), groups=groups)


@pytest.fixture(scope="module")
def first(base):
    return cut(base)


@pytest.fixture(scope="module")
def saved(first, tmp_path_factory):
    return tk.save_pretrained(first, tmp_path_factory.mktemp("kept") / "net")


def load(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def images():
    return [torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(2))]


def conv_rows(model, base, kept) -> None:
    """Every conv of the model is the base's, at the channels that ``kept`` names and nowhere else."""
    assert len(kept) > 5
    for layer, index in kept.items():
        ours, full = model.get_submodule(layer), base.get_submodule(layer)
        assert ours.weight.shape[0] == len(index) < full.weight.shape[0]
        # The norm behind a conv has one number for each output channel, and no input channels that were cut too.
        norm = layer.replace("conv", "bn").replace("downsample.0", "downsample.1")
        if "bn" in norm:
            assert torch.equal(model.get_submodule(norm).weight, base.get_submodule(norm).weight[index]), layer


@pytest.mark.parametrize("indices", [[0], [5], [0, 1], [0, 2], [3, 4, 5, 9], list(range(100)), [0, 1, 7, 8, 9, 50]])
def test_ranges_are_read_as_they_were_written(indices):
    assert read_ranges(ranges_text(indices), "kept", len(indices)) == tuple(indices)


def test_a_loaded_model_knows_what_was_kept(base, first, saved):
    for model in (first.model, load(saved)):
        kept = kept_of(model, base)
        assert {layer: index.tolist() for layer, index in kept.items()} == {
            layer: index.tolist() for layer, index in first.kept_channels.items()
        }
    assert tk.ChannelConfig.load(saved / "channels.json") == first.channel_config


def test_recovery_of_a_loaded_model_equals_that_of_the_result(base, saved):
    torch.manual_seed(0)
    loaded, given = load(saved), load(saved)
    tk.recover(loaded, base, images())
    tk.recover(given, base, images(), kept=kept_of(given, base))
    before = load(saved).state_dict()
    assert any(not torch.equal(t, before[n]) for n, t in loaded.state_dict().items() if "conv" in n), "it did something"
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, given.state_dict()[name]), name


def test_selection_needs_no_kept_for_a_loaded_model(base, first, saved):
    config = tk.DistillationConfig(ikd_init="selection", ikd_at="convs")
    module = DistillationModule(load(saved), base, config)
    assert len(module.projections) > 5
    for name, weight in module.projections.items():
        index = first.kept_channels[name.replace("/", ".")]
        assert weight.shape[1] == len(index) and torch.equal(weight.argmax(0), index)
    with pytest.raises(KnapsackError, match="needs kept"):
        DistillationModule(load(saved), base, config, kept={})


def test_finetune_with_selection_runs_on_a_loaded_model(base, saved):
    batches = [(images()[0][:4], torch.tensor([0, 1, 2, 3]))]
    distillation = tk.DistillationConfig(ikd_init="selection", ikd_at="convs")
    config = tk.FinetuneConfig(epochs=1, lr=1e-4, distillation=distillation, progress=False)
    assert tk.finetune(load(saved), base, batches, None, config).updates == 1


@pytest.mark.parametrize("loaded", [False, True])
def test_after_a_second_pruning_channels_are_counted_in_the_original_base(base, first, saved, loaded):
    torch.manual_seed(1)
    for module in base.modules():  # every channel is told from every other
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.weight)
    result = cut(base)
    middle = load(tk.save_pretrained(result, saved.parent / "middle")) if loaded else result.model
    second = cut(middle, 0.5)
    conv_rows(second.model, base, kept_of(second.model, base))
    conv_rows(second.model, middle, second.kept_channels)
    relative = kept_of(second.model, middle)
    assert all(torch.equal(relative[layer], index) for layer, index in second.kept_channels.items())
    again = load(tk.save_pretrained(second, saved.parent / "second"))
    conv_rows(again, base, kept_of(again, base))
    for teacher in (base, middle):
        assert tk.recover(load(saved.parent / "second"), teacher, images()) is not None


def test_the_comparison_above_can_fail(base, first):
    wrong = {layer: index.flip(0) for layer, index in first.kept_channels.items()}
    torch.nn.init.normal_(base.bn1.weight)
    with pytest.raises(AssertionError):
        conv_rows(cut(base).model, base, wrong)


def test_a_teacher_with_other_channels_is_refused(base, first):
    other = cut(base, backwards=True)
    with pytest.raises(KeepError, match="which the teacher has not"):
        kept_of(first.model, other.model)


def test_a_folder_of_an_earlier_version_still_loads(base, first, saved, tmp_path):
    """Version 1 had no ``kept``; recovery then says that it needs it."""
    folder = tk.save_pretrained(first, tmp_path / "old")
    for name in ("config.json", "channels.json"):
        data = json.loads((folder / name).read_text())
        channels = data["model_args"]["channels"] if name == "config.json" else data
        assert channels.pop("kept") and channels["version"] == 2
        channels["version"] = 1
        (folder / name).write_text(json.dumps(data))
    old = load(folder)
    assert torch.equal(old(images()[0]), load(saved)(images()[0]))
    assert kept_of(old, base) == {} and old.channel_config == first.channel_config.architecture()
    with pytest.raises(KnapsackError, match="nothing says which"):
        tk.recover(old, base, images())
    second = cut(old, 0.5)  # what the first cut kept is unknown, so nothing is claimed of the base
    narrowed = {name for name, dims in old.channel_config.widths.items() if 0 in dims}
    assert not narrowed & set(second.channel_config.kept)
    assert set(second.kept_channels), "counted in the model that was pruned it is known"


def test_registering_a_name_takes_the_architecture_alone(first):
    other = cut(first.model, 1.0)
    assert tk.register_pruned_model(first.channel_config) == tk.register_pruned_model(other.channel_config)
