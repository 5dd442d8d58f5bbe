"""Runs, numbers and kills of `attack_promises`: what a run refuses, what is never worse, what a kill leaves behind."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.files.atomic import settle
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.slim.tensor_files import write_state, write_tensors
from timm_knapsack.training.checkpoints import read_checkpoint, write_checkpoint
from timm_knapsack.training.distillation import DistillationConfig
from timm_knapsack.training.evaluation import evaluate
from timm_knapsack.training.finetuning import FinetuneConfig, finetune
from timm_knapsack.values.scores import Scores

import timm  # isort: skip

Attempt = tuple[str, Callable[[], object], bool]  # its name, what is done, and whether it must be refused


def network(width: int = 6, norm: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    norms = [torch.nn.BatchNorm2d(width)] if norm else []
    layers = torch.nn.Conv2d(3, width, 3), *norms, torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 4))


def batches(count: int = 4, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, 8, 8, generator=draw), torch.arange(4)) for _ in range(count)]


def pruned(scores: Callable[[int], torch.Tensor] = lambda size: torch.rand(size).double()):
    net = network().eval()
    groups = tk.find_channel_groups(net, torch.empty(1, 3, 8, 8))
    return net, tk.prune(
        net, scores={g.name: scores(g.size) for g in groups}, budget=tk.Budget(macs=0.5), groups=groups
    )


def saved(folder: Path) -> Path:
    config = ChannelConfig("cifar_resnet8x2", {})
    return tk.save_pretrained(timm.create_model("knapsack_pruned", channels=config), folder / "net", verify=False)


# ---- training -----------------------------------------------------------------------------------------------------

PLAIN = DistillationConfig(kd_weight=0, ikd_weight=0)


def run(folder: Path, data, resume: bool = False, student=None, **changes):
    config = FinetuneConfig(
        epochs=2, lr=0.01, distillation=PLAIN, output_dir=str(folder / "run"), freeze_bn_stats=False
    )
    return finetune(student or network(3), None, data, None, replace(config, **changes), resume=resume)


def part_training(folder: Path) -> Iterator[Attempt]:
    def other(change: Callable[[list], object]) -> Callable[[], object]:
        def attempt():
            run(folder, batches(), overwrite=True)
            data = batches()
            data = change(data) or data
            run(folder, data, resume=True)

        return attempt

    yield "resume: the same data", other(lambda data: None), False
    yield "resume: one pixel", other(lambda data: data[0][0][1, 0, 0, 0].add_(1e-3)), True
    yield "resume: one label", other(lambda data: data[0][1][1].fill_(0)), True
    yield "resume: one image less", other(lambda data: [*data[:3], (data[3][0][:3], data[3][1][:3])]), True
    yield "resume: another order", other(lambda data: data[::-1]), True
    yield "resume: another batch size", other(lambda data: [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in
                                              zip(data[::2], data[1::2], strict=True)]), True  # fmt: skip
    for key, value in (
        ("epoch", -1),
        ("epoch", 99),
        ("batch", 10**9),
        ("update", 3),
        ("sums", "a"),
        ("update", 10**400),
    ):

        def counters(key=key, value=value):
            run(folder, batches(), overwrite=True)
            path = folder / "run" / "last" / "state.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
            run(folder, batches(), resume=True)

        yield f"resume: {key} is {str(value)[:9]}", counters, True

    def nan():
        data = batches(6)
        student, expected = network(3), network(3)
        try:
            run(folder, [*data[:3], (data[3][0] * float("nan"), data[3][1]), *data[4:]], student=student,
                overwrite=True, scheduler="constant", epochs=1)  # fmt: skip
        except KnapsackError as error:
            assert "not finite" in str(error)
        else:
            raise AssertionError("trained on NaN")
        run(folder, data, student=expected, overwrite=True, scheduler="constant", epochs=1, steps_per_epoch=3)
        pairs = zip(student.state_dict().values(), expected.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), "weights or statistics are not those of the last good update"

    yield "a NaN in batch 3: weights and statistics of update 3", nan, False
    for label in (4, -1, 10**9):

        def labels(label=label, evaluating=False):
            data = batches()
            data[2][1][1] = label
            evaluate(network(3), data) if evaluating else run(folder, data, overwrite=True)

        yield f"label {label} in batch 2", labels, True
        yield f"label {label} in batch 2 of the evaluation", lambda f=labels: f(evaluating=True), True

    for left in (0, 1, 3):

        def fewer(left=left, evaluating=False):
            data = batches()
            data[2] = data[2][0], data[2][1][:left]
            evaluate(network(3), data) if evaluating else run(folder, data, overwrite=True)

        yield f"{left} labels for the 4 images of batch 2", fewer, True
        yield f"{left} labels for the 4 images of batch 2 of the evaluation", lambda f=fewer: f(evaluating=True), True

    def weights_beside():
        run(folder, batches(), output_dir=str(folder / "beside"))
        mine = folder / "beside" / "last" / "mine.safetensors"
        mine.write_text("years of work")
        try:
            run(folder, batches(), output_dir=str(folder / "beside"), overwrite=True)
        finally:
            assert mine.read_text() == "years of work"

    yield "a user's own weights beside those of a checkpoint, overwrite=True", weights_beside, True

    def mine(name):
        def attempt():
            place = folder / "mine" / name
            place.mkdir(parents=True)
            (place / "thesis.tex").write_text("years of work")
            try:
                run(folder, batches(), output_dir=str(folder / "mine"), overwrite=True)
            finally:
                assert (place / "thesis.tex").read_text() == "years of work"

        return attempt

    for name in ("last", "best"):
        yield f"a user's own files in {name}, overwrite=True", mine(name), True

    def second_run():
        ready, started = os.pipe()
        child = os.fork()
        if child == 0:

            class Waiting(list):
                def __iter__(self):
                    os.write(started, b".")
                    time.sleep(600)
                    return list.__iter__(self)

            run(folder, Waiting(batches()), output_dir=str(folder / "two"))
            os._exit(0)
        os.read(ready, 1)
        try:
            run(folder, batches(), output_dir=str(folder / "two"))
            raise AssertionError("two runs in one folder")
        except KnapsackError as error:
            assert "another run writes to" in str(error)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        run(folder, batches(), output_dir=str(folder / "two"))  # the lock went with the process

    yield "two runs in one folder, then the first is killed", second_run, False


# ---- numbers and faults -------------------------------------------------------------------------------------------


def part_numbers(folder: Path) -> Iterator[Attempt]:
    def recovered(**options):
        net, result = pruned()
        tk.recover(result.model, net, batches(), kept=result.kept_channels, **options)

    def fitted(images):
        net, result = pruned()
        groups = tk.find_channel_groups(net, torch.empty(1, 3, 8, 8))
        after = tk.slice_model(net, groups, result.keep)
        return net, result.model, tk.recover(after, net, [images] * 2, kept=result.kept_channels)

    for option in ({"ridge": -1}, {"ridge": 0}, {"ridge": float("nan")}, {"ridge": "a"}, {"images": -1}, {"images": 0}):
        yield f"recover({option})", lambda option=option: recovered(**option), True
    for ridge in (1e-17, 1e-320):

        def alike(ridge=ridge):
            net = network().eval()
            for tensor in (*net[0].parameters(), *net[1].parameters(), *net[1].buffers()):
                tensor.data.copy_(tensor.data[:1].clone() if tensor.dim() else tensor.data)
            groups = tk.find_channel_groups(net, torch.empty(1, 3, 8, 8))
            scores = {g.name: torch.arange(1.0, g.size + 1) for g in groups}
            result = tk.prune(net, scores=scores, budget=tk.Budget(macs=0.5), groups=groups)
            slim = tk.recover(result.model, net, batches(), kept=result.kept_channels, ridge=ridge)
            assert all(torch.isfinite(p).all() for p in slim.parameters())

        yield f"recover(ridge={ridge}) where all channels are alike", alike, False
    for name, scores in (
        ("negative", -torch.arange(1.0, 7).double()),
        ("NaN", torch.full((6,), float("nan"))),
        ("complex", torch.ones(6, dtype=torch.complex64)),
    ):
        yield f"scores: {name}", lambda scores=scores: pruned(lambda size: scores[:size]), True
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    plain = {"black": torch.zeros_like(x), "grey": torch.full_like(x, 0.5), "huge": torch.full_like(x, 1e6)}
    plain["of a plain colour each"] = x[..., :1, :1].expand_as(x)
    for name, images in plain.items():
        yield f"recovery on images that are {name}", lambda images=images: fitted(images), True
    poor = {"one image, four times": x[:1].expand_as(x), "almost grey": 0.5 + 1e-6 * x, "black but for a pixel": x * 0}
    poor["black but for a pixel"][..., 3, 3] = 1
    poor["tiny"], poor["large"] = 1e-6 * x, 1e4 * x
    for name, images in poor.items():

        @torch.no_grad()
        def never_worse(images=images):
            net, before, after = fitted(images)
            errors = [(slim.eval()(images) - net(images)).square().mean() for slim in (before, after)]
            assert torch.isfinite(errors[1]) and errors[1] <= errors[0] * 1.01, errors

        yield f"recovery on images that are {name} is not worse on them", never_worse, False

    @contextmanager
    def full_disk():
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, handler)

    big = {"w": torch.ones(100_000)}
    writers = {
        "safetensors": lambda: write_tensors(folder / "f", big),
        "torch": lambda: write_state(folder / "f", big),
        "scores": lambda: Scores({"w": big["w"].double()}).save(folder / "f"),
        "checkpoint": lambda: write_checkpoint(folder / "last", {"model": big}, {}),
        "optimizer": lambda: write_checkpoint(folder / "last", {}, {}, big),
        "model": lambda: saved(folder),
    }
    for name, write in writers.items():

        def on_full_disk(write=write):
            try:
                with full_disk():
                    write()
                raise AssertionError("written")
            except (KnapsackError, OSError) as error:
                assert "\n" not in str(error) and "File too large" in str(error), str(error)
            assert not list(folder.glob(".*writing*"))

        yield f"a full disk: {name}", on_full_disk, False

    def two_writers():
        def write(number):
            for _ in range(30):
                Scores({"a": torch.full((3000,), float(number)).double()}, model=str(number)).save(folder / "s")

        children = []
        for number in range(3):
            children.append(os.fork())
            if children[-1] == 0:
                write(number)
                os._exit(0)
        read = 0
        while children:
            if (folder / "s").exists():
                found = Scores.load(folder / "s")
                assert (found["a"] == float(found.model)).all()
                read += 1
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                children.remove(done)
        assert read > 0 and not list(folder.glob(".*writing*"))

    yield "Scores.save by three processes at once", two_writers, False


# ---- kills and instances ------------------------------------------------------------------------------------------


def part_kills(folder: Path, count: int) -> Iterator[Attempt]:
    def whole(number: int) -> Callable[[], object]:
        def attempt():
            """A process writes checkpoints 1, 2, 3, … of three equal parts until it is killed."""
            place = folder / f"kill{number}"
            place.mkdir()

            def write(value):
                filled = {"w": torch.full((20_000,), float(value))}
                write_checkpoint(place / "last", {"model": filled, "ema": filled}, {"value": value}, filled)

            write(0)
            ready, started = os.pipe()
            child = os.fork()
            if child == 0:
                for value in range(1, 10_000):
                    write(value)
                    os.write(started, b".") if value == 1 else None
            os.read(ready, 1)
            time.sleep(random.Random(number).uniform(0, 0.2))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert settle(place / "last")
            found = read_checkpoint(place / "last")
            parts = [found.tensors["model"]["w"], found.tensors["ema"]["w"], found.optimizer["w"]]
            assert all((part == found.state["value"]).all() for part in parts), "parts of different checkpoints"
            write(-1)
            assert os.listdir(place) == ["last"], os.listdir(place)

        return attempt

    for number in range(count):
        yield f"SIGKILL {number} while checkpoints are written", whole(number), False


def part_knapsack(folder: Path, count: int, portion: int = 1000) -> Iterator[Attempt]:
    """Random instances of many kinds: the exact solver's value is the dynamic program's."""

    def equal(first: int) -> Callable[[], object]:
        def attempt():
            for number in range(first, min(first + portion, count)):
                draw = random.Random(f"knapsack {number}")
                size, kind = draw.randint(1, 14), draw.randrange(5)
                weights = [draw.randint(0 if kind == 4 else 1, draw.choice((3, 20, 200))) for _ in range(size)]
                values = [
                    draw.random() if kind == 0
                    else w + draw.choice((0, 1, 10)) if kind == 1  # correlated: bounds are tight
                    else float(w) if kind == 2  # subset sum
                    else draw.randint(0, 3) if kind == 3  # many alike
                    else draw.choice((0.0, 1e-9, 1.0, 1e9))
                    for w in weights
                ]  # fmt: skip
                capacity = draw.randint(0, sum(weights) + 1)
                exact, table = (tk.solve_knapsack(values, weights, capacity, method=m) for m in ("exact", "dp"))
                kept = [(v, w) for v, w, k in zip(values, weights, exact.keep, strict=True) if k]
                near = 1e-12 * max(1.0, sum(map(abs, values)))
                assert abs(exact.value - table.value) <= near, f"instance {number}: {exact.value} and {table.value}"
                assert sum(w for _, w in kept) <= capacity and abs(sum(v for v, _ in kept) - exact.value) <= near, (
                    number
                )
                assert exact.upper_bound >= exact.value - near, number

        return attempt

    for first in range(0, count, portion):
        yield f"knapsack instances from {first}", equal(first), False
