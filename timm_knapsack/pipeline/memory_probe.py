"""How much memory a network holds while it runs, in a process of its own.

What counts is the resident memory while images go through, beyond what Python and the libraries had before the network
was loaded: weights, maps, and what the runtime keeps. Linux only: the kernel tells the peak since it was last reset.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import KnapsackError
from ..maps.steady_memory import trim
from ..models.model_source import ModelSource
from ..runtimes.kinds import open_runtime

PASSES = 3
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_memory(
    runtime: str, shape: Sequence[int], *, file: str | None = None, source: ModelSource | None = None, **options: Any
) -> int | None:
    """Bytes that a network holds at most while it runs; None where the system can't tell.

    Args:
        shape: of the images.
        file: what the runtime converted the network to, or an ONNX file; otherwise ``source`` says how to make it.
        options: of the runtime: threads, int8.
    """
    if not _STATUS.exists():
        return None
    job = {"runtime": runtime, "shape": list(shape), "file": file, "options": options}
    job["source"] = source.to_dict() if source is not None else None
    command = [sys.executable, "-m", "timm_knapsack.pipeline.memory_probe", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        raise KnapsackError(f"memory of a network in {runtime} can't be measured: {reason}; memory=False leaves it out")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_here(job: dict[str, Any]) -> int | None:
    """The same in this process, which should have done nothing else."""
    runtime = open_runtime(job["runtime"], **job["options"])
    runtime.load_library()  # counts before, not as the network's
    images = torch.zeros(job["shape"])
    with torch.inference_mode():
        before = _kilobytes("VmRSS")
        given = Path(job["file"]).read_bytes() if job["file"] else ModelSource(**job["source"]).load()
        run = runtime.start(given, images)
        del given
        gc.collect()
        trim()
        try:
            _RESET.write_text("5")  # the peak starts anew
        except OSError:
            return None
        for _ in range(PASSES):
            run(images)
    return max(_kilobytes("VmHWM") - before, 0) * 1024


def _kilobytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])


if __name__ == "__main__":
    print(json.dumps(measure_here(json.loads(sys.argv[1]))))
