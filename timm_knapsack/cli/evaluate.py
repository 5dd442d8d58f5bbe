"""evaluate: accuracy, MACs and parameters of a model."""

import os

from ..errors import KnapsackError
from . import console
from .options import DataOptions, DeviceOption, JsonOption, NetworkOptions, verb


@verb()
def evaluate(
    network: NetworkOptions,
    data: DataOptions,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Top-1 and top-5 accuracy of a model, pruned or not, with its MACs and parameters.

    Example: timm-knapsack evaluate resnet20-half --data images
    """
    if data.source is None:
        raise KnapsackError("evaluate needs images with labels: --data FOLDER")
    where = console.choose_device(device)
    from ..costs.counted import count_macs, count_params
    from ..human_numbers import human
    from ..images.loaders import create_loader
    from ..training.evaluation import evaluate as measure

    model = network.source().load().to(where)
    loader = create_loader(data.source, model, **data.loader_options(), labels="required")
    if where == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    metrics = measure(model, loader)
    facts = {"model": network.model, **metrics, "macs": count_macs(model), "params": count_params(model)}
    if as_json:
        console.print_json(facts)
        return
    console.stdout().print(
        f"{network.model}: top-1 {metrics['top1']:.2f} %, top-5 {metrics['top5']:.2f} %, loss {metrics['loss']:.4f} on "
        f"{metrics['samples']} images; {human(facts['macs'])} MACs, {human(facts['params'])} parameters",
        markup=False,
    )
