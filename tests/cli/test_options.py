"""Option groups: written once, spread into each verb's single options."""

import inspect

import pytest

from timm_knapsack.cli import app as cli
from timm_knapsack.cli.options import DataOptions, MeasuringOptions, NetworkOptions, verb


def options_of(name: str) -> dict[str, inspect.Parameter]:
    command = next(c for c in cli.app.registered_commands if c.callback.__name__ == name)
    return dict(inspect.signature(command.callback).parameters)


def test_groups_are_spread_and_filled_again():
    seen = {}

    @verb(limit=8)
    def show(network: NetworkOptions, data: DataOptions, out: str = "x") -> None:
        seen.update(network=network, data=data, out=out)

    show(model="resnet18", source="images", weights="w", out="y")
    assert seen["network"] == NetworkOptions("resnet18", weights="w")
    assert seen["data"] == DataOptions("images", limit=8)
    assert seen["out"] == "y"


def test_every_verb_that_reads_images_has_all_options_of_data():
    fields = set(inspect.signature(DataOptions).parameters)
    for name in ("score", "prune", "evaluate", "finetune"):
        assert fields <= set(options_of(name)), name


def test_a_verb_has_its_own_defaults():
    sizes = {name: options_of(name)["batch_size"].default for name in ("score", "evaluate", "finetune", "latency")}
    assert sizes == {"score": 64, "evaluate": 64, "finetune": 192, "latency": 1}
    assert options_of("score")["limit"].default == 1024 and options_of("evaluate")["limit"].default is None


def test_a_wrong_group_is_found_when_it_is_written():
    with pytest.raises(TypeError, match="'batch_size' is there twice"):

        @verb()
        def twice(data: DataOptions, measuring: MeasuringOptions) -> None: ...

    with pytest.raises(TypeError, match="has no option 'limti'"):

        @verb(limti=3)
        def misspelt(data: DataOptions) -> None: ...
