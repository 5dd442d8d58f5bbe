"""What surrounds a training loop: a stop on SIGTERM, and a progress bar on a terminal."""

import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Set by SIGTERM while its ``with`` lasts; the loop looks at ``requested`` and ends by itself.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print(stop.requested)
        True
    """

    def __init__(self):
        self.requested = False
        self._former = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
            self._former = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *_) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)

    def _request(self, signum, frame) -> None:
        self.requested = True


class ProgressBar:
    """Bar, time left and the loss terms, on stderr; nothing where ``show`` is False or stderr is no terminal."""

    def __init__(self, show: bool):
        self.show = show and sys.stderr.isatty()
        self._bar = None

    @contextmanager
    def over(self, total: int) -> Iterator["ProgressBar"]:
        """Show progress towards ``total`` batches."""
        if not self.show:
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, TextColumn("{task.fields[terms]}"), console=Console(stderr=True)) as self._bar:
            self._task = self._bar.add_task("fine-tuning", total=total, terms="")
            yield self
        self._bar = None

    def print(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self.show:
            print(line, file=sys.stderr)

    def update(self, done: int, description: str, terms: Mapping[str, float], lr: float, speed: float) -> None:
        if self._bar is not None:
            text = " ".join(f"{term} {value:.3f}" for term, value in terms.items())
            text = f"{text} · lr {lr:.2g} · {speed:.0f} img/s"
            self._bar.update(self._task, completed=done, description=description, terms=text)


def epoch_line(epoch: int, epochs: int, history: Sequence[Mapping], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """How far a run is, for a log.

    Example:
        >>> epoch_line(2, 8, [{"total": 0.25}], [{"epoch": 2, "top1": 91.5}])
        'epoch 2 of 8, loss 0.25, top-1 91.50 %'
    """
    words = [f"epoch {epoch} of {epochs}", f"loss {history[-1]['total']:.3g}"]
    if evaluations and evaluations[-1]["epoch"] == epoch:
        found = evaluations[-1]
        words.append(f"top-1 {found['top1']:.2f} %" if "top1" in found else f"KL from the original {found['kl']:.3g}")
    return ", ".join(words)
