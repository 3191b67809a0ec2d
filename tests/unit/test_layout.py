"""The arrows of the map: which room may import which, what stays out of it, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "counterpoint"
MAX_LINES = 420
FLOOR = {"errors", "records"}
ALLOWED: dict[str, set[str]] = {  # room: the rooms it may import, besides the floor and itself
    "errors": set(),
    "records": set(),
    "machine": set(),
    "trace": set(),
    "diagnose": {"trace", "machine"},
    "collectives": {"machine"},
    "controls": {"machine"},
    "measure": {"collectives", "controls", "machine"},
    "policy": {"measure", "plan", "machine"},
    "parallel": {"policy", "collectives", "controls", "machine"},
    "plan": {"machine"},
    "report": set(),
}
FREE = {"__init__", "__main__", "cli", "commands"}  # they join the rooms
NO_TORCH = {"errors", "records", "trace", "diagnose", "report", "plan", "machine", *FREE}
GPU_PACKAGES = {"torch", "triton", "cuda"}
GPU_ROOMS = {"collectives", "controls", "measure", "policy", "parallel"}
ANALYSIS_PACKAGES = {"polars", "plotly", "jinja2", "scipy"}


def room_of(path: Path) -> str:
    """The first part below the package: `trace` for trace/kineto.py, `errors` for errors.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(source: str, path: Path) -> Iterator[str]:
    """Dotted names of everything that `source` imports at any depth, relative imports made absolute."""
    package = ["counterpoint", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{name.name}" for name in node.names)


def violations(source: str, path: Path) -> list[str]:
    """What `source`, if it stood at `path`, would import against the map."""
    room = room_of(path)
    wrong = []
    for name in imported(source, path):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "counterpoint" and room not in FREE:
            may = ALLOWED[room] | {room} | (set() if room in FLOOR else FLOOR)
            if target in (ALLOWED.keys() | FREE) - may:
                wrong.append(f"{room} -> {target}")
        if top in GPU_PACKAGES and room in NO_TORCH:
            wrong.append(f"{room} imports {top}")
        if top in ANALYSIS_PACKAGES and room in GPU_ROOMS:
            wrong.append(f"{room} imports {top}")
    return wrong


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_the_package_is_found() -> None:
    """The tests below look at real files."""
    assert PACKAGE / "errors.py" in modules()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_map(path: Path) -> None:
    """No module imports a room that the map does not allow, nor a package that its room must do without."""
    assert violations(path.read_text(), path) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_has_a_room(path: Path) -> None:
    """A new room or top-level module has to be put on the map."""
    assert room_of(path) in ALLOWED.keys() | FREE


@pytest.mark.parametrize(
    ("where", "source", "expected"),
    [
        ("trace/x.py", "from counterpoint.diagnose import accounts", "trace -> diagnose"),
        ("trace/x.py", "from counterpoint import report", "trace -> report"),
        ("trace/x.py", "from ..cli import main", "trace -> cli"),
        ("report/html.py", "import counterpoint.diagnose.waits", "report -> diagnose"),
        ("records.py", "from counterpoint.errors import BadTrace", "records -> errors"),
        ("diagnose/x.py", "def late():\n    import torch", "diagnose imports torch"),
        ("cli.py", "from torch.cuda import Stream", "cli imports torch"),
        ("policy/x.py", "import polars as pl", "policy imports polars"),
    ],
)
def test_a_planted_violation_is_seen(where: str, source: str, expected: str) -> None:
    """The checker itself: each kind of forbidden import is reported."""
    assert violations(source, PACKAGE / where) == [expected]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_too_long(path: Path) -> None:
    """A file that has grown past the limit wants to be two."""
    assert len(path.read_text().splitlines()) <= MAX_LINES


HEAVY = ("torch", "polars", "plotly", "jinja2", "numpy")


IMPORT = "import counterpoint"
HELP = "import sys; sys.argv = ['counterpoint', '--help']; from counterpoint.cli import main; main()"


@pytest.mark.parametrize("statement", [IMPORT, HELP], ids=["import", "help"])
def test_start_is_light(statement: str) -> None:
    """`import counterpoint` and `counterpoint --help` load none of the heavy packages."""
    probe = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('LOADED', [name for name in {HEAVY!r} if name in sys.modules]))\n"
        f"{statement}\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["LOADED []"]), done.stderr
