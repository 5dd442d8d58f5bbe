"""Errors a user can act on: each says what was wrong, where, the value seen, and the way out."""


class KnapsackError(ValueError):
    """Base of every error that timm_knapsack raises for a user's input.

    The command line prints it as one line; anything else that is raised is a bug of ours.

    Example:
        >>> try:
        ...     raise KnapsackError("budget macs=0 leaves nothing; give a fraction above 0, such as 0.5")
        ... except ValueError as error:
        ...     print(error)
        budget macs=0 leaves nothing; give a fraction above 0, such as 0.5
    """


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


class RecipeError(KnapsackError):
    """A recipe with an unknown key or an impossible value."""


class TrainingError(KnapsackError):
    """Training that can't go on: a loss that is not finite, teacher and student that do not match."""


class HubError(KnapsackError):
    """A Hub upload or download that failed, with what to do about it."""


def first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
