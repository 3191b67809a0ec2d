"""The pages: what is generated is current, and the examples in them are commands and names that exist."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest
import typer.main

from counterpoint.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def load(path: Path) -> object:
    """Import a program of docs/ by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(language: str) -> list[tuple[str, str]]:
    found = ((page, *block) for page in PAGES for block in BLOCK.findall(page.read_text()))
    return [(str(page.relative_to(ROOT)), dedent(text)) for page, name, text in found if name == language]


COMMANDS = sorted(
    {
        (page, line.strip())
        for page, text in [*blocks(""), *blocks("bash")]
        for line in text.splitlines()
        if line.startswith("counterpoint ")
    }
)
IMPORTS = sorted(
    {
        (node.module, name.name)
        for _, text in blocks("python")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("counterpoint")
        for name in node.names
    }
)


def test_the_page_of_options_is_current() -> None:
    """docs/reference/cli.md is what docs/write_cli.py writes; run it after a change of an option."""
    written = load(ROOT / "docs" / "write_cli.py")
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == written.text()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_of_a_page_is_understood(page: str, line: str) -> None:
    """The command line takes its options, and files of this repository exist."""
    name, *arguments = shlex.split(line, comments=True)[1:]
    if name == "COMMAND":
        return
    group = typer.main.get_command(app)
    group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    own = [argument for argument in arguments if argument.startswith(("samples/", "examples/"))]
    assert [argument for argument in own if not (ROOT / argument).exists()] == []


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_every_import_of_a_page_exists(module: str, name: str) -> None:
    """The module defines the name, or has it in `__all__`; it is read and not imported: torch would cost seconds."""
    path = ROOT / "src" / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(source.read_text()).body
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            defined.update(ast.literal_eval(node.value))
    assert name in defined
