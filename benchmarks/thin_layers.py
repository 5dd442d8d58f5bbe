"""Why a pruned network's time falls less than its MACs: how fast its convs compute, and what else takes time.

    python benchmarks/thin_layers.py quickstart [--out benchmarks/results/thin_layers.txt]

The network of the quickstart and the one it was pruned to, on one thread. Times are CPU times of that thread, the least
of many rounds in which both networks run in turns, so that what else runs on the machine counts as little as it can.
"""

import argparse
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from output import writer
from torch import Tensor, nn

from timm_knapsack.costs.counted import count_macs
from timm_knapsack.maps.steady_memory import memory_kept

import timm  # isort: skip  (timm_knapsack first: it knows the network)


class Stopwatch:
    """The least time of each conv, of all other layers together, and of the whole."""

    def __init__(self, model: nn.Module):
        self.model, self.least = model.eval(), {}
        for name, module in model.named_modules():
            if not any(module.children()):
                module.register_forward_pre_hook(lambda *_, name=name: self.began.update({name: time.thread_time()}))
                module.register_forward_hook(lambda *_, name=name: self.noted(name, time.thread_time()))
        self.began: dict[str, float] = {}

    def noted(self, name: str, now: float) -> None:
        self.least[name] = min(self.least.get(name, float("inf")), now - self.began[name])

    def run(self, images: Tensor) -> None:
        self.began["all"] = time.thread_time()
        self.model(images)
        self.noted("all", time.thread_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `make quickstart` left")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    say = writer(options.out)
    torch.set_num_threads(1)
    base = timm.create_model("cifar_resnet8x2", checkpoint_path=str(options.folder / "base.safetensors"))
    slim = timm.create_model(f"local-dir:{options.folder / 'model'}", pretrained=True)
    networks = {"original": base, "pruned": slim}
    macs = {name: count_macs(network) for name, network in networks.items()}
    say(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, one thread")
    widths = ", ".join(f"{w.shape[1]}→{w.shape[0]}" for w in slim.parameters() if w.ndim == 4)
    say(f"convs of the pruned network: {widths}")
    say(f"MACs of the pruned network: {macs['pruned'] / macs['original']:.1%} of the original's")
    say("batch  network       ms   share   convs ms  GMAC/s in convs  the rest ms")
    with memory_kept(), torch.inference_mode():
        for batch in (1, 16, 64):
            images = torch.randn(batch, 3, 32, 32)
            watches = {name: Stopwatch(network) for name, network in networks.items()}
            for _ in range(max(20, options.rounds // batch)):
                for watch in watches.values():
                    watch.run(images)
                    watch.run(images)
            for name, watch in watches.items():
                whole, kinds = watch.least["all"], dict(watch.model.named_modules())
                convs = sum(least for layer, least in watch.least.items() if isinstance(kinds.get(layer), nn.Conv2d))
                share = whole / watches["original"].least["all"]
                say(
                    f"{batch:>5}  {name:<8}{whole * 1e3:>8.2f}{share:>8.1%}{convs * 1e3:>11.2f}"
                    f"{macs[name] * batch / convs / 1e9:>17.0f}{(whole - convs) * 1e3:>13.2f}"
                )
                for module in kinds.values():
                    module._forward_hooks.clear()
                    module._forward_pre_hooks.clear()


if __name__ == "__main__":
    main()
