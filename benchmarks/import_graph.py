"""The import graph of the package: modules, packages, edges, and edges that go up or sideways between rooms.

    python benchmarks/import_graph.py --before ../before --moves e9caca0 6123f28 --duplicates duplicates \\
        | tee benchmarks/results/import_graph.txt

The order of the rooms and the imports that a function may make are in pyproject.toml ([tool.timm-knapsack.rooms]);
tests/test_layers.py fails on what this script counts. Imports are read from the source, so those inside functions and
those for type checkers count too. A checkout from before the rooms is judged by where its modules were moved to
(``--moves OLD NEW``, two commits); what both are compared in besides: places with repeated lines, and the CPU time of
``import timm_knapsack``.
"""

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings it
    import tomli as tomllib

PACKAGE = "timm_knapsack"
ROOT = Path(__file__).resolve().parent.parent
FRONT_DOOR = ("", "__main__", "_registration")  # may import every room; no room imports them


@dataclass(frozen=True)
class Rules:
    """Who may import whom. ``order``: levels of rooms, each may import from those before it."""

    order: tuple[tuple[str, ...], ...]
    lazy: frozenset[str] = frozenset()  # packages that a function may import, anywhere
    lazy_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # room → what its functions may import

    @classmethod
    def read(cls, pyproject: Path) -> "Rules":
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["timm-knapsack"]["rooms"]
        lazy_in = {room: tuple(names) for room, names in table["function-imports-in"].items()}
        order = tuple(tuple(level.split()) for level in table["order"])
        return cls(order, frozenset(table["function-imports"]), lazy_in)

    @property
    def levels(self) -> dict[str, int]:
        return {room: number for number, level in enumerate(self.order) for room in level}


@dataclass(frozen=True)
class Import:
    """One import of one module: ``values.scores`` → ``slim.channel_groups``, or → ``torch`` with ``ours`` False."""

    module: str
    target: str
    line: int
    in_function: bool
    ours: bool


def read_imports(package: Path) -> tuple[set[str], list[Import]]:
    """The package's modules by their dotted names below it, and every import in them.

    Example:
        >>> modules, imports = read_imports(ROOT / PACKAGE)
        >>> "errors" in modules
        True
    """
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports = []
    for module, path in files.items():
        where = module.split(".") if module else []
        where = where if path.name == "__init__.py" else where[:-1]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            for target, ours in _targets(node, where, set(files), package.name):
                imports.append(Import(module, target, node.lineno, id(node) in inside, ours))
    return set(files), imports


def _targets(node: ast.AST, where: list[str], modules: set[str], package: str) -> Iterator[tuple[str, bool]]:
    """What a statement imports, as (dotted name, whether it is ours)."""
    if isinstance(node, ast.Import):
        for name in (alias.name for alias in node.names):
            head, _, rest = name.partition(".")
            yield (rest, True) if head == package else (name, False)
    elif isinstance(node, ast.ImportFrom):
        path = node.module.split(".") if node.module else []
        if node.level:
            path = where[: len(where) + 1 - node.level] + path
        elif path[0] == package:
            path = path[1:]
        else:
            yield node.module, False
            return
        for alias in node.names:  # from .room import module, or from .room.module import name
            inner = ".".join([*path, alias.name])
            yield (inner if inner in modules else ".".join(path)), True
    elif isinstance(node, ast.Call):  # what is imported by a computed name can't be read: never allowed in a room
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__"):
            yield f"{name}(…)", False


def room_of(module: str) -> str:
    """``costs.latency.table`` → ``costs``; the front door → the empty name."""
    return module.partition(".")[0]


def wrong_ways(imports: list[Import], rules: Rules, home: Mapping[str, str] | None = None) -> list[Import]:
    """Imports between rooms that go up or sideways, or to the front door.

    Args:
        home: where modules are counted to be, for a package that has no rooms yet.
    """
    levels, home = rules.levels, home or {}
    wrong = []
    for one in imports:
        here, there = (room_of(home.get(name, name)) for name in (one.module, one.target))
        if one.ours and here not in FRONT_DOOR and here != there and here in levels:
            if there in FRONT_DOOR or levels.get(there, len(levels)) >= levels[here]:
                wrong.append(one)
    return wrong


def hidden_imports(imports: list[Import], rules: Rules) -> list[Import]:
    """Imports inside functions of what is not heavy or optional, and imports by computed names."""
    wrong = []
    for one in imports:
        room = room_of(one.module)
        allowed = rules.lazy | set(rules.lazy_in.get(room, ()))
        if room in FRONT_DOOR or "*" in allowed:
            continue
        if "(…)" in one.target or (one.in_function and (one.ours or one.target.partition(".")[0] not in allowed)):
            wrong.append(one)
    return wrong


def cycles(imports: list[Import], home: Mapping[str, str] | None = None) -> list[list[str]]:
    """Rings of modules of one room that import each other, each as the sorted names of its members.

    Example:
        >>> ring = [Import("a.x", "a.y", 1, False, True), Import("a.y", "a.x", 1, True, True)]
        >>> cycles(ring)
        [['a.x', 'a.y']]
    """
    home, edges = home or {}, defaultdict(set)
    for one in imports:
        here, there = (room_of(home.get(name, name)) for name in (one.module, one.target))
        if one.ours and here == there and here not in FRONT_DOOR:
            edges[one.module].add(one.target)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for target in edges[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    reach = {module: reached(module) for module in list(edges)}
    rings = {tuple(sorted(m for m in reach if m in reach[n] and n in reach[m])) for n in reach if n in reach[n]}
    return sorted(list(ring) for ring in rings)


def rooms_table(package: Path, rules: Rules) -> str:
    """CONTRIBUTING.md's table of rooms, in their order, from their own docstrings."""
    lines = ["| room | what for | in | out |", "|---|---|---|---|"]
    for room in (room for level in rules.order for room in level):
        is_package = (package / room).is_dir()
        path = package / room / "__init__.py" if is_package else package / f"{room}.py"
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        what, came, went = room_docstring(room, text) if is_package else (text.partition("\n")[0], "", "")
        cells = [text.rstrip(".").replace("``", "`").replace("|", "\\|") for text in (what, came, went)]
        lines.append(f"| `{room}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def room_docstring(room: str, text: str) -> tuple[str, str, str]:
    """The three lines of a room's docstring, without their heads; an error where it is not of this form."""
    lines = [line for line in text.splitlines() if line]
    heads = (f"Room {room}: ", "In: ", "Out: ")
    if len(lines) != 3 or not all(line.startswith(head) for line, head in zip(lines, heads, strict=True)):
        raise ValueError(f"{room}/__init__.py: its docstring must be three lines: {', '.join(repr(h) for h in heads)}")
    return tuple(line.removeprefix(head) for line, head in zip(lines, heads, strict=True))


# ---- before and after ----------------------------------------------------------------------------------------------


def moved(old: str, new: str) -> dict[str, str]:
    """Where git saw each module go between two commits: ``{"tracing": "channels.tracing"}``."""
    command = ["git", "-C", str(ROOT), "diff", "--name-status", "-M50%", old, new, "--", PACKAGE]
    found = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        status, *paths = line.split("\t")
        if status.startswith("R") and paths[0].endswith(".py"):
            names = [".".join(Path(path).with_suffix("").parts[1:]) for path in paths]
            found[names[0]] = names[1]
    return found


def describe(checkout: Path, rules: Rules, home: Mapping[str, str] | None = None) -> list[str]:
    modules, imports = read_imports(checkout / PACKAGE)
    packages = {module for module in modules if (checkout / PACKAGE / module.replace(".", "/")).is_dir()} - {""}
    edges = {(one.module, one.target) for one in imports if one.ours and one.module != one.target}
    back = sorted({(one.module, one.target) for one in wrong_ways(imports, rules, home)})
    rooms = {module: room_of((home or {}).get(module, module)) for module in modules}
    hidden = [one for one in imports if one.in_function and rooms[one.module] not in rules.lazy_in]
    lines = [
        f"modules {len(modules)}, packages {len(packages)}, edges {len(edges)}, back edges {len(back)}, "
        f"cycles inside a room {len(cycles(imports, home))}",
        f"imports inside functions outside of the command line: {len(hidden)}, of them of our own modules "
        f"{sum(one.ours for one in hidden)}",
    ]
    return lines + [f"  back: {module} → {target or PACKAGE}" for module, target in back]


def repeated(checkout: Path, command: str) -> str:
    """The first line of a tool that looks for repeated lines: how many pairs of places there are."""
    options = ["--repo", str(checkout), "--min-lines", "6", "--most", "200", "--seconds", "120"]
    done = subprocess.run([*command.split(), *options], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]


def import_seconds(checkout: Path, names: str) -> float:
    """CPU seconds of importing these names in a new process."""
    code = f"import os, {names}; t = os.times(); print(t.user + t.system)"
    run = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    return float(run.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--moves", nargs=2, metavar=("OLD", "NEW"), help="commits between which modules went to rooms")
    parser.add_argument("--runs", type=int, default=5, help="of the import, in turns")
    parser.add_argument("--duplicates", metavar="COMMAND", help="a tool that looks for repeated lines")
    parser.add_argument("--table", action="store_true", help="print CONTRIBUTING.md's table of rooms, nothing else")
    options = parser.parse_args()
    rules = Rules.read(ROOT / "pyproject.toml")
    if options.table:
        print(rooms_table(ROOT / PACKAGE, rules), end="")
        return
    home = moved(*options.moves) if options.moves else None
    checkouts = {"before": options.before.resolve(), "after": ROOT} if options.before else {"after": ROOT}
    for name, checkout in checkouts.items():
        print(f"{name}:")
        for line in describe(checkout, rules, home if name == "before" else None):
            print(f"  {line}")
        if options.duplicates:
            print(f"  repeated lines: {repeated(checkout, options.duplicates)}")
    for names in ("timm_knapsack", "timm_knapsack, timm"):  # before the rooms, the first imported timm by itself
        seconds = defaultdict(list)
        for _ in range(options.runs):
            for name, checkout in checkouts.items():
                seconds[name].append(import_seconds(checkout, names))
        for name, times in seconds.items():
            shown = ", ".join(f"{time:.2f}" for time in times)
            print(f"import {names}, CPU seconds, {name}: {shown}; least {min(times):.2f}")


if __name__ == "__main__":
    main()
