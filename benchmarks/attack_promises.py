"""The promises of SECURITY.md and docs/reliability.md, each tried by hand: prints tried and failed, part by part.

usage: python benchmarks/attack_promises.py [--part files …] [--instances 20000] [--kills 48] [--out FILE]

Each attempt runs in a fork of this process, with its own clock and its own peak of memory. What must be refused must be
so by a KnapsackError of one printable line, in under a second of CPU time and with less than 200 MB; what must hold is
said by an assertion. ``make fuzz``, ``make fuzz-networks`` and ``make mutants`` do the same by chance.
"""

import argparse
import ast
import json
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks.output, when run as a script
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import timm_knapsack as tk
from benchmarks.attack_runs import Attempt, part_kills, part_knapsack, part_numbers, part_training, saved
from benchmarks.output import writer
from timm_knapsack.errors import KnapsackError
from timm_knapsack.hub.patience import TRIES, patiently
from timm_knapsack.models.model_source import ModelSource
from timm_knapsack.pipeline.recipe import Recipe
from timm_knapsack.slim.channel_config import ChannelConfig

import timm  # isort: skip

MAX_SECONDS, MAX_BYTES, MAX_LENGTH = 1.0, 200 * 2**20, 1000


# ---- files from strangers -----------------------------------------------------------------------------------------


def with_config(folder: Path, change: Callable[[dict], object]) -> Callable[[], object]:
    whole = (folder / "net" / "config.json").read_text()

    def attempt():
        config = json.loads(whole)
        change(config)
        path = folder / "net" / "config.json"
        path.write_text(json.dumps(config))
        try:
            ModelSource(str(folder / "net")).load()
        finally:
            path.write_text(whole)

    return attempt


def in_file(path: Path, text: str, use: Callable[[Path], object]) -> Callable[[], object]:
    def attempt():
        path.write_text(text)
        began = time.process_time()
        use(path)
        return time.process_time() - began

    return attempt


def part_files(folder: Path) -> Iterator[Attempt]:
    saved(folder)

    def channels(**values):
        return with_config(folder, lambda c: c["model_args"]["channels"].update(values))

    vit = {"base": "vit_tiny_patch16_224", "widths": {}}
    yield "config.json: trusted and 50 000 layers deep", with_config(folder, lambda c: c["model_args"].update(
        trusted=True, channels={**c["model_args"]["channels"], "base_args": {"depth": 50_000}})), True  # fmt: skip
    yield "config.json: trusted", with_config(folder, lambda c: c["model_args"].update(trusted=True)), True
    yield "config.json: img_size 24000", channels(**vit, base_args={"img_size": 24_000}), True
    yield "config.json: img_size 2000", channels(**vit, base_args={"img_size": 2_000}), True
    yield "config.json: 2**20 classes", with_config(folder, lambda c: c.update(num_classes=2**20)), True
    yield "config.json: 2**20 classes in model_args", with_config(
        folder, lambda c: c["model_args"].update(num_classes=2**20)), True  # fmt: skip
    yield "config.json: 2**20 classes in base_args", channels(base_args={"num_classes": 2**20}), True
    yield "config.json: depth 6002", channels(base_args={"depth": 6002}), True
    yield "config.json: an unknown key", with_config(folder, lambda c: c["model_args"].update(evil=1)), True
    for base in ("../../etc/passwd", "hf-hub:a/b", "local-dir:/etc", ".."):
        yield f"config.json: base {base}", channels(base=base), True
    keys = ",".join(f'"w{i}": {{"0": 1}}' for i in range(500_000))
    twice = f'{{"format": "timm-knapsack/channels", "version": 1, "base": "resnet18", "widths": {{{keys}, "w7": 1}}}}'
    yield "channels.json: 500 000 keys, one twice", in_file(folder / "c.json", twice, ChannelConfig.load), True
    some = ",".join(f'"w{i}": {{"0": 1}}' for i in range(150_000))
    fits = f'{{"format": "timm-knapsack/channels", "version": 1, "base": "resnet18", "widths": {{{some}, "w7": 1}}}}'
    yield "channels.json: 150 000 keys, one twice", in_file(folder / "c.json", fits, ChannelConfig.load), True
    laughs = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'lol'}]" for i in range(10))
    yield "recipe: billion laughs", in_file(folder / "r.yaml", laughs, Recipe.load), True
    yield "recipe: 20 MB", in_file(folder / "r.yaml", "name: " + "a" * 20_000_000, Recipe.load), True
    yield "recipe: a key twice", in_file(folder / "r.yaml", "name: a\nname: b", Recipe.load), True
    yield "recipe: 10 000 brackets", in_file(folder / "r.yaml", "[" * 10_000, Recipe.load), True
    yield (
        "recipe: python/object",
        in_file(folder / "r.yaml", "!!python/object/apply:os.system [true]", Recipe.load),
        True,
    )
    recipe = {"name": "a", "model": {"name": "resnet18"}, "data": {"source": "images"}, "budget": {"macs": 0.5}}
    for name in ("..", "../a", "/tmp/a", ".hidden", "a/b", ""):
        yield f"recipe: the name {name!r}", lambda name=name: Recipe.from_dict({**recipe, "name": name}), True
    for output in ("..", "a/../../b"):
        options = {"finetune": {"epochs": 1, "output_dir": output}}
        yield f"recipe: output_dir {output!r}", lambda options=options: Recipe.from_dict({**recipe, **options}), True

    def evil_card():
        evil = "<script>alert(1)</script> [x](javascript:alert(1)) `a`\n# heading\n```\n{{ 7 * 7 }} \x1b[31m"
        name = 'net"); import os; os.system("touch was_here") #`<b>'
        model = timm.create_model("knapsack_pruned", channels=ChannelConfig("cifar_resnet8x2", {}))
        words = {"notes": [evil], "datasets": [evil], "base_model": evil}
        card = (tk.save_pretrained(model, folder / name, verify=False, **words) / "README.md").read_text()
        body = card.split("---", 2)[2]
        assert "<script" not in body and not re.search(r"(?<!\\)\]\(javascript", body) and "\x1b" not in card
        code = body.split("```python")[1].split("```")[0]
        called = {ast.unparse(node.func) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
        assert "os.system" not in called and body.count("```") == 2

    yield "model card: markup, code and a folder's name that is code", evil_card, False


# ---- the Hub ------------------------------------------------------------------------------------------------------


def part_hub(folder: Path) -> Iterator[Attempt]:
    saved(folder)
    for token in ("hf_secret\nX: y", "hf_secrét", "hf secret", "\x00hf_secret", "", 7):

        def push(token=token):
            try:
                tk.push_to_hub(folder / "net", "org/net", token=token)
            except Exception as error:
                text = f"{error} {error.__cause__} {error.__context__}"
                assert not str(token).strip() or str(token).strip() not in text, "the token is in the error"
                assert "hf_secret" not in text, "part of the token is in the error"
                raise

        yield f"a token {token!r}", push, True

    def repeated(before: int, cause: bool):
        def attempt():
            from huggingface_hub import HfApi

            token = "hf_" + "secretly" * 4

            def answer(*_, **__):
                if cause:
                    raise RuntimeError("no connection") from ValueError(f"Illegal header value b'Bearer {token}'")
                raise RuntimeError("x" * before + token)

            HfApi.create_repo = answer
            try:
                tk.push_to_hub(folder / "net", "org/net", token=token)
            except KnapsackError as error:
                assert "hf_secret" not in "".join(traceback.format_exception(error)), "the token is in the error"
                raise

        return attempt

    for before in (0, 280, 290):
        yield f"a server that repeats the token after {before} characters", repeated(before, False), True
    yield "a token in the error that an error came of", repeated(0, True), True

    class Busy(Exception):
        def __init__(self, status, after=None):
            headers = {} if after is None else {"Retry-After": str(after)}
            self.response = type("Response", (), {"status_code": status, "headers": headers})

    def busy(status, times, after, calls, slept):
        def attempt():
            from timm_knapsack.hub import patience

            waits, count = [], [0]
            patience.time = type("Time", (), {"sleep": staticmethod(waits.append)})

            def call():
                count[0] += 1
                if count[0] <= times:
                    raise Busy(status, after)
                return "done"

            try:
                assert patiently(call) == "done" and times < calls + 1
            except Busy:
                assert times >= calls
            assert count[0] == calls and waits == slept, (count, waits)

        return attempt

    for status in (429, 500, 502, 503, 504):
        yield f"the Hub answers {status} twice", busy(status, 2, None, 3, [1.0, 2.0]), False
        yield f"the Hub answers {status}, Retry-After 7", busy(status, 1, 7, 2, [7.0]), False
        yield f"the Hub answers {status} for good", busy(status, 99, None, TRIES, [1.0, 2.0, 4.0, 8.0]), False
        yield f"the Hub answers {status}, Retry-After a day", busy(status, 99, 86_400, 1, []), False
    for status in (400, 401, 403, 404):
        yield f"the Hub answers {status}: not tried again", busy(status, 99, 7, 1, []), False
    for umask in (0o022, 0o077, 0o027):

        def permissions(umask=umask):
            os.umask(umask)
            modes = {file.stat().st_mode & 0o777 for file in saved(folder / f"{umask:o}").iterdir() if file.is_file()}
            assert modes == {0o666 & ~umask}, [f"{mode:o}" for mode in modes]

        yield f"permissions with umask {umask:03o}", permissions, False


# ---- running them -------------------------------------------------------------------------------------------------


def tried(attempt: Callable[[], object], must_be_refused: bool) -> tuple[str, float, int]:
    """What went wrong (nothing, if empty), CPU seconds and bytes, of an attempt in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        torch.manual_seed(0)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        memory, began, problem = _peak(reset=True), time.process_time(), ""
        try:
            attempt()
            problem = "not refused" if must_be_refused else ""
        except KnapsackError as error:
            text = str(error)
            problem = "" if must_be_refused and text.isprintable() and 0 < len(text) <= MAX_LENGTH else f"said {text!r}"
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"[:300] or type(error).__name__
        seconds, grown = time.process_time() - began, _peak() - memory
        os.write(write, json.dumps([problem, seconds, grown]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    problem, seconds, grown = json.loads(said) if said else ("the process died", 0.0, 0)
    if not problem and must_be_refused and seconds > MAX_SECONDS:
        problem = f"took {seconds:.1f} s"
    if not problem and must_be_refused and grown > MAX_BYTES:
        problem = f"took {grown / 2**20:.0f} MB"
    return problem, seconds, grown


def _peak(reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> int:
    parts = {"files": part_files, "training": part_training, "numbers": part_numbers, "hub": part_hub}
    parts |= {"kills": part_kills, "knapsack": part_knapsack}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--kills", type=int, default=48)
    parser.add_argument("--instances", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    say = writer(options.out)
    say(f"$ python {shlex.join(sys.argv)}")
    say(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}")
    more = {"kills": (options.kills,), "knapsack": (options.instances,)}
    all_failed = 0
    for name in options.part or parts:
        count = failed = 0
        slowest, largest = (0.0, ""), (0, "")
        with tempfile.TemporaryDirectory() as folder:
            for what, attempt, must_be_refused in parts[name](Path(folder), *more.get(name, ())):
                problem, seconds, grown = tried(attempt, must_be_refused)
                count += 1
                if must_be_refused:
                    slowest, largest = max(slowest, (seconds, what)), max(largest, (grown, what))
                if problem:
                    failed += 1
                    say(f"{name}: {what}: {problem}")
        limits = f"; refusals took at most {slowest[0]:.2f} s ({slowest[1]}) and {largest[0] / 2**20:.0f} MB"
        say(f"{name}: {count} tried, {failed} failed{limits if slowest[1] else ''}")
        all_failed += failed
    return int(all_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
