"""Imports between rooms go one way, stand at the top of their files, and CONTRIBUTING.md says what each room is for.

The order of the rooms is in pyproject.toml; what reads the import graph is benchmarks/import_graph.py.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from import_graph import (  # noqa: E402
    FRONT_DOOR,
    PACKAGE,
    Rules,
    cycles,
    hidden_imports,
    read_imports,
    room_docstring,
    room_of,
    rooms_table,
    wrong_ways,
)


def faults(package: Path, rules: Rules) -> list[str]:
    """All that is wrong with a package's imports, one line each."""
    modules, imports = read_imports(package)
    there = {room_of(module) for module in modules} - set(FRONT_DOOR)
    found = [f"the room {room} is not in the order" for room in sorted(there - set(rules.levels))]
    found += [f"the order names {room}, which is no room" for room in sorted(set(rules.levels) - there)]
    for one in wrong_ways(imports, rules):
        found.append(f"{one.module}:{one.line} imports {one.target or 'the front door'}: up or sideways")
    for one in hidden_imports(imports, rules):
        found.append(f"{one.module}:{one.line} imports {one.target} inside a function")
    for one in imports:
        if one.ours and room_of(one.target) == "cli" and room_of(one.module) not in ("cli", "__main__"):
            found.append(f"{one.module}:{one.line} imports the command line")
    return found + [f"{' and '.join(ring)} import each other" for ring in cycles(imports)]


def test_imports_between_rooms_go_one_way():
    assert faults(ROOT / PACKAGE, Rules.read(ROOT / "pyproject.toml")) == []


def test_contributing_has_the_table_of_rooms():
    """`python benchmarks/import_graph.py --table` prints it anew."""
    table = rooms_table(ROOT / PACKAGE, Rules.read(ROOT / "pyproject.toml"))
    assert table in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


# ---- the checker can fail


RULES = Rules((("errors", "words"), ("low",), ("high",), ("cli",)), frozenset({"scipy"}), {"cli": ("*",)})
SOUND = {
    "__init__.py": "from .high import top\n",
    "__main__.py": "from .cli.app import main\n",
    "errors.py": "import json\n",
    "words.py": "",
    "low/__init__.py": "",
    "low/base.py": "from ..errors import Wrong\n\ndef fit():\n    from scipy.optimize import nnls\n",
    "low/more.py": "from .base import fit\nfrom . import base\n",
    "high/__init__.py": "",
    "high/top.py": "import made_up.low.base\nfrom made_up.low import more\nfrom ..words import word\n",
    "cli/__init__.py": "",
    "cli/app.py": "def main():\n    from ..high import top\n    import torch\n",
}


def _file(key: str) -> str:
    return "__init__.py" if key == "front_door" else f"{key.replace('__', '/')}.py"


def made_up(folder: Path, **changes: str) -> Path:
    """A package with sound imports but for the changed files (``low__base`` for low/base.py)."""
    package = folder / "made_up"
    for name, text in (SOUND | {_file(key): text for key, text in changes.items()}).items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


def test_a_sound_package_has_no_faults(tmp_path):
    assert faults(made_up(tmp_path), RULES) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"low__base": "from ..high.top import x"}, "low.base:1 imports high.top: up or sideways"),
        ({"low__base": "from ..high import top"}, "low.base:1 imports high.top: up or sideways"),
        ({"low__base": "import made_up.high.top"}, "low.base:1 imports high.top: up or sideways"),
        ({"low__base": "from made_up.high import top"}, "low.base:1 imports high.top: up or sideways"),
        ({"low__base": "def f():\n    from ..high.top import x"}, "low.base:2 imports high.top: up or sideways"),
        (
            {"low__base": "if TYPE_CHECKING:\n    from ..high.top import x"},
            "low.base:2 imports high.top: up or sideways",
        ),
        ({"low__deep__x": "from ...high.top import x"}, "low.deep.x:1 imports high.top: up or sideways"),
        ({"errors": "from .words import word"}, "errors:1 imports words: up or sideways"),
        ({"low__base": "import made_up"}, "low.base:1 imports the front door: up or sideways"),
        ({"low__base": "from .. import missing"}, "low.base:1 imports the front door: up or sideways"),
        ({"attic__x": ""}, "the room attic is not in the order"),
        ({"low__base": "from . import more"}, "low.base and low.more import each other"),
        ({"low__base": "def f():\n    from .more import x"}, "low.base and low.more import each other"),
        ({"low__base": "from .base import fit"}, "low.base import each other"),
        ({"high__top": "from ..cli import app"}, "high.top:1 imports the command line"),
        ({"front_door": "from .cli import app"}, ":1 imports the command line"),
        ({"low__base": "def f():\n    import json"}, "low.base:2 imports json inside a function"),
        ({"low__base": "f = lambda: __import__('json')"}, "low.base:1 imports __import__(…) inside a function"),
        (
            {"low__base": "import_module('.high.top', 'made_up')"},
            "low.base:1 imports import_module(…) inside a function",
        ),
    ],
)
def test_what_is_wrong_is_found(tmp_path, changes, fault):
    assert fault in faults(made_up(tmp_path, **changes), RULES)


def test_an_order_with_a_room_that_is_gone_is_found(tmp_path):
    rules = Rules((*RULES.order, ("gone",)), RULES.lazy, RULES.lazy_in)
    assert faults(made_up(tmp_path), rules) == ["the order names gone, which is no room"]


@pytest.mark.parametrize("text", ["", "Room low: a.\n\nIn: b. Out: c.", "Low.\n\nIn: b.\nOut: c."])
def test_a_room_must_say_what_it_is_for(text):
    with pytest.raises(ValueError, match="must be three lines"):
        room_docstring("low", text)
