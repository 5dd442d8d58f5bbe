"""Errors a user can act on: each says what was wrong, where, the value seen, and the way out."""

import re

MAX_LENGTH = 1000
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{16,}")  # of the Hugging Face Hub; a server's answer may repeat it


def in_one_line(text: str, length: int = MAX_LENGTH) -> str:
    """A text that may hold anything from a stranger's file, fit for a terminal: one line, nothing that steers it.

    Example:
        >>> in_one_line("no such\\n  key: \\x1b[31mred")
        'no such key: \\\\x1b[31mred'
        >>> in_one_line("a" * 100, 20)
        'aaaaaaaaaaa … aaaaaa'
    """
    if len(text) > 4 * length:
        text = text[: 2 * length] + text[-2 * length :]
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= length:
        return text
    end = (length - 3) // 3 + 1  # the way out stands at the end
    return f"{text[: length - 3 - end]} … {text[-end:]}"


class KnapsackError(ValueError):
    """Base of every error that timm_knapsack raises for a user's input.

    Its message is one line of at most 1000 characters, whatever text of a file or an argument is in it. The command
    line prints it; anything else that is raised is a bug of ours. What looks like a token of the Hub is left out.

    Example:
        >>> try:
        ...     raise KnapsackError("budget macs=0 leaves nothing; give a fraction above 0, such as 0.5")
        ... except ValueError as error:
        ...     print(error)
        budget macs=0 leaves nothing; give a fraction above 0, such as 0.5
    """

    def __init__(self, message: object = ""):
        super().__init__(in_one_line(_TOKEN.sub("hf_…", str(message))))


class ChannelConfigError(KnapsackError):
    """A channel config that can't be read, or does not fit the model it is applied to."""


class KeepError(KnapsackError):
    """A choice of channels that does not fit the groups: unknown group, index out of range, nothing left."""


class TraceError(KnapsackError):
    """A model that can't be run for tracing, with the reason."""


class BudgetError(KnapsackError):
    """A budget that is malformed or can't be reached."""


class ScoreError(KnapsackError):
    """Scores that do not belong to these groups, or data that gives none."""


class LatencyError(KnapsackError):
    """A latency table that does not fit this device, batch size or model."""


class RuntimeChoiceError(KnapsackError):
    """A runtime or an export target that is not known, not installed here, or can't do what is asked."""


class DataError(KnapsackError):
    """Images or labels that can't be found or do not fit the model."""


class CheckpointError(KnapsackError):
    """A checkpoint or weights file that does not fit."""


class StoppedError(KnapsackError):
    """Work that a signal stopped before its end, with the way to go on."""


class RecipeError(KnapsackError):
    """A recipe with an unknown key or an impossible value."""


class TrainingError(KnapsackError):
    """Training that can't go on: a loss that is not finite, teacher and student that do not match."""


class HubError(KnapsackError):
    """A Hub upload or download that failed, with what to do about it."""


def first_line(error: Exception) -> str:
    """Another library's error: its kind, and the first line of what it says."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
