"""Processes of their own without the seconds of CPU that a new interpreter takes to import torch and timm.

A fork of the test process runs a function, and ends without the parent's clean-up. What must be shown of a fresh
interpreter (imports, console scripts, launchers) still starts one.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    """As `subprocess.CompletedProcess`: a negative code is the number of a signal."""

    returncode: int
    stdout: str
    stderr: str


def in_fork(function: Callable[[], Any], cwd: str | Path = ".", env: Mapping[str, str] | None = None) -> Done:
    """Run a function in a fork, with its output caught; an exception is a traceback and a code of 1."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        sys.stdout.flush(), sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os._exit(_run(function, cwd, env or {}, out, err))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Done(code, *(path.read_text() if path.exists() else "" for path in (out, err)))


def in_two_processes(function: Callable, *arguments: Any) -> None:
    """Run a function on two processes over gloo, as Accelerate's debug_launcher starts them."""

    def launch():
        from accelerate import debug_launcher

        debug_launcher(function, arguments, num_processes=2)

    done = in_fork(launch)
    assert done.returncode == 0, done.stderr[-3000:]


def timm_knapsack(words: Sequence[str], cwd: str | Path, env: Mapping[str, str] | None = None) -> Done:
    """The command line in a fork: ``timm-knapsack`` followed by these words."""

    def verb():
        from timm_knapsack.cli.app import main

        sys.argv = ["timm-knapsack", *words]
        main()

    return in_fork(verb, cwd, env)


def _run(function, cwd, env, out: Path, err: Path) -> int:
    try:
        for path, number in ((out, 1), (err, 2)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file, number)
        # pytest's own streams may not be the descriptors
        sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1, encoding="utf-8") for n in (1, 2))
        os.chdir(cwd)
        os.environ.update(env)
        _forget_accelerate()
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush(), sys.stderr.flush()
    return code


def _forget_accelerate() -> None:
    """Accelerate keeps what it learnt about this process, and a fork is another one."""
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
