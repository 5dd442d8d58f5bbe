"""timm-knapsack: the command line, thin over the same functions as the Python interface."""

import sys

import typer

from ..errors import StoppedError
from ..version import __version__
from .compare import compare
from .console import listening_to_ctrl_c, one_line
from .doctor import doctor
from .evaluate import evaluate
from .export import export
from .finetune import finetune
from .flags import flags_of, with_flags
from .groups import groups
from .latency import latency
from .plugins import load_plugin, take_plugins
from .prune import prune
from .publish import publish
from .quickstart import quickstart
from .recover import recover
from .report import report
from .run import run
from .score import score
from .sweep import sweep

HELP = """Prune any timm image model to a budget, exactly, and get an ordinary timm model back.

Exit codes: 0 done, 1 something failed underway, 2 something asked for can't be, 130 stopped.

--debug shows an error's trace. --plugin MODULE (or FILE.py) imports your own criteria, costs and op rules first."""

STOPPED = 130  # the exit code of Ctrl-C in every shell, and what typer makes of it

app = typer.Typer(no_args_is_help=True, help=HELP, pretty_exceptions_enable=False)


for _verb in (
    *(doctor, groups, score, latency, prune, recover, finetune, evaluate, report, publish, run, quickstart),
    *(export, compare, sweep),
):
    app.command()(_verb)


def _version(asked: bool) -> None:
    if asked:
        print(f"timm-knapsack {__version__}")
        raise typer.Exit()


@app.callback()
def _before_any_verb(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error is one line on stderr, and the exit code says whether the user can change it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    plugins, arguments = take_plugins([argument for argument in arguments if argument != "--debug"])
    try:
        for plugin in plugins:
            load_plugin(plugin)
        with listening_to_ctrl_c():
            code = app(arguments, standalone_mode=False)
    except (typer.Exit, SystemExit) as end:
        code = getattr(end, "exit_code", getattr(end, "code", 0))
    except (typer.Abort, KeyboardInterrupt):  # as older versions of typer say it
        code = STOPPED
    except StoppedError as stop:  # a checkpoint was written, and the message says how to go on
        _say(str(stop))
        raise SystemExit(STOPPED) from None
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        code = 0
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        if hasattr(error, "format_message"):  # click's own: a wrong option or argument
            message, code = _usage_error(error, arguments), 2
        else:
            message, code = one_line(error)
            message = with_flags(message, _flags(arguments))
        if message:
            _say(f"error: {message}")
    if code == STOPPED:
        _say(f"stopped{_way_back(arguments)}")
    raise SystemExit(code if isinstance(code, int) else 0)


def _flags(arguments: list[str]) -> dict[str, str]:
    command = typer.main.get_command(app).commands.get(arguments[0] if arguments else "")
    return {} if command is None else flags_of(command)


def _way_back(arguments: list[str]) -> str:
    """How to go on with what a stopped verb has finished, where it keeps any."""
    flags = _flags(arguments)
    if "resume" in flags:
        return f": to go on from the last checkpoint, the same command with {flags['resume']}"
    if arguments[:1] == ["run"] or any(argument.startswith("--table") for argument in arguments):
        return ": the same command goes on with what is finished"
    return ""


def _usage_error(error, arguments: list[str]) -> str:
    message = " ".join(error.format_message().split())
    verb = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    if "--help" in message or not message:
        return message
    return f"{message.rstrip('.')} (timm-knapsack {verb + ' ' if verb in known else ''}--help)"


def _say(message: str) -> None:
    red, reset = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    head, colon, rest = message.partition(":")
    print(f"{red}{head}{colon}{reset}{rest}", file=sys.stderr)
