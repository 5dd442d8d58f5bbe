"""The library's errors name its own arguments (``pretrained=False``); here they become what was to be typed.

A phrase is translated only where the verb has that option, and to the flag that this verb has for it: ``split=…`` is
``--split`` of ``prune`` and ``--train-split`` of ``finetune``; ``run`` has neither, and is told what to --set.
"""

import re
from collections.abc import Mapping

# (the verb's parameter, the library's words, the words for the terminal)
PHRASES = (
    ("teacher_weights", r", or take random (weights|ones) with pretrained=False", ""),  # of a teacher: of no use
    ("teacher_weights", r"\bweights='([^']+)'", r"{flag} \1"),
    ("weights", r"\bweights='([^']+)'", r"{flag} \1"),
    ("pretrained", r"\bpretrained=False", "--no-pretrained"),
    ("model_args", r"\bnum_classes=(\d+)", r"{flag} num_classes=\1"),
    ("image_column", r"\bimage_column=…", "{flag} NAME"),
    ("label_column", r"\blabel_column=…", "{flag} NAME"),
    ("split", r"\bsplit=…", "{flag} NAME"),
    ("split", r"\bsplit=('[^']*')", r"{flag} \1"),
    ("root", r"\broot=…", "{flag} FOLDER"),
    ("limit", r"\blimit=…", "{flag} N"),
    ("limit", r"\blimit=(?=.*: give an integer)", "{flag} "),
    ("workers", r"\bnum_workers=(?=.*: give an integer)", "{flag} "),
    ("target_drop", r"\btarget_drop=", "{flag} "),
    ("ignore", r"\bmin_keep, round_to, bounds and ignore\b", "--min-keep, --round-to and --ignore"),
    ("labels", r"\blabels='ignore'", "{flag} model"),
    ("resume", r"\bresume=True", "{flag}"),
    ("overwrite", r"\boverwrite=True", "{flag}"),
    ("out", r"\banother output_dir\b", "another {flag}"),
    ("table", r"\btable=LatencyTable\.load\('([^']+)'\)", r"{flag} \1"),
    ("round_to", r"\bround_to=", "{flag} "),
    ("min_keep", r"\bmin_keep=", "{flag} "),
    ("threads", r"\bthreads=", "{flag} "),
    ("batch_size", r"\bbatch_size=", "{flag} "),
    ("settings", r"^changes ", "{flag} "),
    # --from is an option of run alone: what it is told stands in the recipe, and --set changes that
    ("from_stage", r"\b(image_column|label_column|root|limit)=…", r"--set data.\1=…"),
    ("from_stage", r"\bsplit=…", "--set data.train_split=… or data.eval_split=…"),
    ("from_stage", r"\bweights='([^']+)'", r"--set model.weights=\1"),
    ("from_stage", r"\bpretrained=False", "--set model.pretrained=false"),
    ("source", r"\bcalibration=loader", "{flag} SOURCE"),
    ("tolerance", r"\btolerance=…", "{flag} PART"),
    ("runtime", r"\bruntime='([^']+)'", r"{flag} \1"),
    ("int8", r"\bint8=True", "{flag}"),
    ("eval_source", r"\(eval_source\)", "({flag} SOURCE)"),
    ("dry_run", r", set HF_TOKEN, or pass token=…", ", or set HF_TOKEN"),
    ("memory", r"\bmemory=False", "--no-memory"),
)


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """The library's words with the flags of a verb in them.

    Args:
        flags: the verb's parameters and how they are typed.

    Example:
        >>> with_flags("choose one with split=…, or pretrained=False", {"split": "--train-split"})
        'choose one with --train-split NAME, or pretrained=False'
    """
    for parameter, words, typed in PHRASES:
        if parameter in flags:
            text = re.sub(words, typed.replace("{flag}", flags[parameter]), text)
    return text


def flags_of(command) -> dict[str, str]:
    """How each option of a click command is typed: ``{"model_args": "--model-arg"}``."""
    options = (parameter for parameter in command.params if parameter.param_type_name == "option")
    return {option.name: max(option.opts, key=len) for option in options if option.name}
