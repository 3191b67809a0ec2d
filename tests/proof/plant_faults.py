"""Plants faults in a copy of the repository, one after another, and says which of them the nearest unit tests let live.

    python -m tests.proof.plant_faults --faults 40 --seed 1

A fault is another comparison or operator, a term less, or two arguments swapped, at a random place of a random room.
The nearest tests of a module are up to eight files of `tests/unit` that import it or bear its name, those of its room
first, else its whole room.
The working tree is read only. A fault that lives is a question: is a test missing, or does the change mean nothing?
"""

import argparse
import ast
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What stands at a place of a file, and what is to stand there."""

    path: Path  # relative to the root
    node: ast.expr
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.node.lineno}: {ast.unparse(self.node)}  ->  {self.after}"

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it."""
        lines = text.encode().splitlines(keepends=True)
        starts = [sum(map(len, lines[: row - 1])) for row in (self.node.lineno, self.node.end_lineno or 0)]
        begin, end = starts[0] + self.node.col_offset, starts[1] + (self.node.end_col_offset or 0)
        whole = b"".join(lines)
        return (whole[:begin] + f"({self.after})".encode() + whole[end:]).decode()


def changed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield what a node may be turned into."""
    match node:
        case ast.Compare(left, [operator], right):
            yield ast.Compare(left, [OTHER[type(operator)]()], right)  # type: ignore[list-item]
        case ast.BinOp(left, operator, right) if type(operator) in OTHER:
            yield ast.BinOp(left, OTHER[type(operator)](), right)  # type: ignore[arg-type]
            yield left
        case ast.BoolOp(operator, [first, *others]):
            yield ast.BoolOp(OTHER[type(operator)](), node.values)  # type: ignore[arg-type]
            yield first if len(others) == 1 else ast.BoolOp(operator, others)
        case ast.Call(function, [first, second, *others], keywords) if not isinstance(first, ast.Starred):
            yield ast.Call(function, [second, first, *others], keywords)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield every expression that runs; not those inside of formatted text, whose places Python 3.11 does not know."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if isinstance(child, ast.expr):
                    yield child
                yield from expressions(child)


def faults(path: Path) -> list[Fault]:
    """Return all that can be planted in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return [Fault(path, node, ast.unparse(after)) for node in expressions(tree) for after in changed(node)]


def nearest(path: Path) -> list[str]:
    """Return the unit tests that are nearest to a module."""
    dotted = path.relative_to("src").with_suffix("").as_posix().replace("/", ".")
    package, _, stem = dotted.rpartition(".")
    imports = re.compile(rf"\b{re.escape(dotted)}\b|from {re.escape(package)} import [^\n]*\b{stem}\b")
    found = [
        str(test.relative_to(ROOT))
        for test in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if test.stem == f"test_{stem}" or imports.search(test.read_text())
    ]
    room = Path("tests", "unit", path.parts[2])
    found.sort(key=lambda test: (Path(test).stem != f"test_{stem}", not Path(test).is_relative_to(room)))
    return found[:8] or [str(room if (ROOT / room).is_dir() else room.parent)]


def outcome(copy: Path, tests: list[str], cpu_s: int) -> str:
    """Return whether the tests catch what was planted in the copy; an endless loop ends with the time of the CPU."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--hypothesis-profile=quick", *tests]
    done = subprocess.run(
        command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy / "src")}, capture_output=True, text=True,
        check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s)),
    )  # fmt: skip
    return "LIVES" if done.returncode == 0 else "caught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40, help="how many (40)")
    parser.add_argument("--seed", type=int, default=1, help="of the places (1)")
    parser.add_argument("--cpu-seconds", type=int, default=600, help="that the tests of one fault may take (600)")
    asked = parser.parse_args()
    dice, rooms = random.Random(asked.seed), dict[str, list[Fault]]()
    for path in sorted((ROOT / "src" / "counterpoint").rglob("*.py")):
        rooms.setdefault(path.relative_to(ROOT).parts[2], []).extend(faults(path.relative_to(ROOT)))
    rooms = {name: found for name, found in rooms.items() if found}
    lives: list[Fault] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist-*"))
        for number in range(asked.faults):
            fault = dice.choice(rooms[dice.choice(sorted(rooms))])
            text = (ROOT / fault.path).read_text()
            (copy / fault.path).write_text(fault.planted(text))
            print(f"{number + 1:3} {fault}", end="", flush=True)
            found = outcome(copy, tests := nearest(fault.path), asked.cpu_seconds)
            print(f"  {found} by {len(tests)} files", flush=True)
            lives += [fault] if found == "LIVES" else []
            (copy / fault.path).write_text(text)
    print(f"{asked.faults - len(lives)} of {asked.faults} faults were caught; these live:", *lives, sep="\n  ")


if __name__ == "__main__":
    main()
