"""Text from files and users inside Markdown: it is shown as it is, and can't become markup, HTML or code."""

import json
import re

from ..errors import in_one_line

_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_MARKUP = re.compile(r"[\\`*\[\]|~$!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside of a word is none
_LINE_START = re.compile(r"^(\d*)([#+\-=.)])(?=[#+\-=]*(?:\s|$))")  # a heading or a list
_REPOSITORY = re.compile(r"[\w\-]+(?:\.[\w\-]+)*(?:/[\w\-]+(?:\.[\w\-]+)*)?", re.ASCII)


def text(value: object) -> str:
    """A value as text of one line.

    Example:
        >>> print(text("**bold** <script> [a](b) resnet50_half"))
        \\*\\*bold\\*\\* &lt;script&gt; \\[a\\](b) resnet50_half
    """
    line = in_one_line(str(value))
    line = _MARKUP.sub(lambda found: "\\" + found[0], line)
    line = re.sub("[&<>]", lambda found: _HTML[found[0]], line)
    return _LINE_START.sub(r"\1\\\2", line)


def code(value: object) -> str:
    """A value as a piece of code in a line.

    Example:
        >>> code("a`b")
        '`` a`b ``'
    """
    line = in_one_line(str(value)) or " "
    runs = max((len(run) for run in re.findall("`+", line)), default=0)
    mark, space = "`" * (runs + 1), " " if runs else ""
    return f"{mark}{space}{line}{space}{mark}"


def repository(name: object) -> str:
    """A link to a repository of the Hub, where the name can be one.

    Example:
        >>> repository("me/net"), repository("me/net) <b>")
        ('[me/net](https://huggingface.co/me/net)', 'me/net) &lt;b&gt;')
    """
    if isinstance(name, str) and _REPOSITORY.fullmatch(name):
        return f"[{name}](https://huggingface.co/{name})"
    return text(name)


def python_text(value: str) -> str:
    """A text as a literal of Python, in double quotes.

    Example:
        >>> python_text('net"); import os #')
        '"net\\\\"); import os #"'
    """
    return json.dumps(value, ensure_ascii=not value.isprintable())


def table(head, rows) -> str:
    """A table; each cell is `text`.

    Example:
        >>> print(table(["a", "b"], [["x|y", 3]]))
        | a | b |
        |---|---|
        | x\\|y | 3 |
    """
    lines = [head, *rows]
    shown = ["| " + " | ".join(text(cell) for cell in line) + " |" for line in lines]
    return "\n".join([shown[0], "|" + "---|" * len(head), *shown[1:]])
