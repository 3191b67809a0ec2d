"""The arrows of the map: which room may import which, what stays out of it, and what is there only once."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "counterpoint"
FLOOR = {"errors", "records", "rehearsed", "version"}
ALLOWED: dict[str, set[str]] = {  # room: the rooms it may import, besides the floor and itself
    "errors": set(),
    "version": set(),
    "records": set(),
    "rehearsed": set(),
    "machine": set(),
    "doctor": {"machine"},
    "processes": set(),
    "read_file": set(),
    "trace": set(),
    "diagnosis": {"trace", "machine", "pair", "collectives"},
    "monitoring": {"diagnosis", "trace"},
    "pair": {"machine"},
    "tuned": {"machine", "pair", "read_file"},
    "collectives": {"machine", "pair"},
    "controls": {"machine", "pair", "trace", "tuned"},
    "measurement": {"collectives", "controls", "machine", "pair", "parallel", "processes"},
    "parallel": {"collectives", "controls", "machine", "pair", "tuned"},
    "plan": {"machine", "pair", "read_file"},
    "tuning": {"collectives", "controls", "diagnosis", "machine", "measurement", "pair", "parallel", "trace"}
    | {"monitoring", "processes", "read_file", "tuned"},
    **{name: {"parallel"} for name in ("ddp", "expert_parallel", "tensor_parallel", "torch_backend", "torchtitan")},
    "rehearsal": {"machine", "monitoring", "parallel", "processes", "tuning"},
    "rendering": set(),
}
FREE = {"__init__", "__main__", "cli", "commands"}  # they join the rooms
NO_TORCH = {"errors", "records", "rehearsed", "trace", "diagnosis", "rendering", "plan", "machine", "doctor", "pair"}
NO_TORCH |= {"processes", "read_file", "tuned", *FREE}
GPU_PACKAGES = {"torch", "triton", "cuda"}
GPU_ROOMS = {"collectives", "controls", "ddp", "expert_parallel", "measurement", "pair", "parallel", "rehearsal"}
GPU_ROOMS |= {"tensor_parallel", "torch_backend", "torchtitan", "tuned", "tuning"}
ANALYSIS_PACKAGES = {"polars", "jinja2", "scipy", "yaml"}


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: Path) -> str:
    """The first part below the package: `trace` for trace/kineto.py, `errors` for errors.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    """The name by which a module is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, path: Path) -> Iterator[str]:
    """Dotted names of everything that `source` imports at any depth, relative imports made absolute."""
    package = ["counterpoint", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes(source):
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


def import_circle(modules: Mapping[Path, str]) -> list[str]:
    """Modules of which each imports the next, wherever in the file; empty where there is no such circle."""
    names = {dotted(path) for path in modules}
    graph: dict[str, set[str]] = {}
    for path, source in modules.items():
        found = {name if name in names else name.rpartition(".")[0] for name in imported(source, path)}
        graph[dotted(path)] = (found & names) - {dotted(path)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def shared_class_names(modules: Mapping[Path, str]) -> dict[str, list[str]]:
    """Public names of classes that are defined in several modules, with these modules."""
    places = defaultdict(list)
    for path, source in modules.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(dotted(path))
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_every_module_has_a_room() -> None:
    assert {room_of(path) for path in sources()} == ALLOWED.keys() | FREE


def test_imports_follow_the_map() -> None:
    wrong = {dotted(path): found for path, source in sources().items() if (found := violations(source, path))}
    assert wrong == {}


def test_no_module_imports_itself_through_others() -> None:
    assert import_circle(sources()) == []


def test_a_class_name_is_used_once() -> None:
    assert shared_class_names(sources()) == {}
