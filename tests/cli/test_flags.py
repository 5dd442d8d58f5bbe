"""The library names its arguments in errors, never flags; the command line translates them for the verb typed."""

import ast
import re
from pathlib import Path

import pytest
import typer

import timm_knapsack
from timm_knapsack.cli.app import app, main
from timm_knapsack.cli.flags import PHRASES, flags_of, with_flags

LIBRARY = Path(timm_knapsack.__file__).parent
VERBS = {name: flags_of(command) for name, command in typer.main.get_command(app).commands.items()}


def texts(path: Path):
    """The strings of a file that are no docstrings; what an f-string fills in shows as '1', or 1."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(id(node.value))  # a docstring
        elif isinstance(node, ast.JoinedStr):
            parts.update(id(value) for value in node.values)
            shown = {ord("r"): "'1'"}
            yield "".join(
                value.value if isinstance(value, ast.Constant) else shown.get(value.conversion, "1")
                for value in node.values
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def library_texts():
    for path in sorted(LIBRARY.rglob("*.py")):
        if path.relative_to(LIBRARY).parts[0] != "cli":
            for text in texts(path):
                yield path.relative_to(LIBRARY).as_posix(), text


def test_the_library_names_no_flags():
    named = [(place, text) for place, text in library_texts() if re.search(r"(^|[\s(`'])--[a-z]", text)]
    assert named == []


def test_the_search_finds_a_flag(tmp_path):
    file = tmp_path / "a.py"
    file.write_text('"""Says --out."""\nraise Wrong(f"give {x!r} with --out, or {y}")\n')
    assert list(texts(file)) == ["give '1' with --out, or 1"]


@pytest.mark.parametrize(("parameter", "words", "typed"), PHRASES)
def test_no_phrase_is_stale(parameter, words, typed):
    """Each is said somewhere in the library, and is an option of some verb."""
    filled_in = words.replace("image_column", "1_column")  # f"{kind}_column=…"
    filled_in = re.sub(r"(limit|num_workers)=\(", "1=(", filled_in)  # f"{name}={value!r}: give an integer"
    assert any(re.search(words, text) or re.search(filled_in, text) for _, text in library_texts())
    assert any(parameter in flags for flags in VERBS.values())


@pytest.mark.parametrize(
    ("verb", "said", "typed"),
    [
        ("prune", "give yours with weights='FILE.safetensors'", "give yours with --weights FILE.safetensors"),
        ("score", "or take random ones with pretrained=False", "or take random ones with --no-pretrained"),
        ("groups", "num_classes=10 makes the classifier fit", "--model-arg num_classes=10 makes the classifier fit"),
        ("prune", "choose one with split=…", "choose one with --split NAME"),
        ("finetune", "choose one with split=…", "choose one with --train-split NAME"),
        ("run", "or weights='a'", "or --set model.weights=a"),
        ("run", "name one with image_column=…", "name one with --set data.image_column=…"),
        ("groups", "choose one with split=…, or weights='a'", "choose one with split=…, or weights='a'"),
        ("prune", "min_keep='x': expected a count", "--min-keep 'x': expected a count"),
        ("finetune", "go on with resume=True", "go on with --resume"),
        ("finetune", "FinetuneConfig(steps_per_epoch=…)", "FinetuneConfig(steps_per_epoch=…)"),
    ],
)
def test_words_become_the_flags_of_the_verb(verb, said, typed):
    assert with_flags(said, VERBS[verb]) == typed


def test_the_terminal_shows_flags(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["score", "cifar_resnet20", "--data", str(tmp_path), "--out", str(tmp_path / "scores")])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert "give yours with --weights FILE.safetensors, or take random ones with --no-pretrained" in error
