"""Report how each module and call runs: `Report`, for FSDP2, DDP, tensor and expert parallelism and the backend.

`print(report)` shows its tables, `msgspec.json.encode(report)` writes it for programs, and `report.require()` raises
where nothing was replaced. Reasons for torch are texts of `Route.why` (`group.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from counterpoint.errors import NoEffect
from counterpoint.records import Record

_SIZES = {20: "below 1 MiB", 24: "1 to 16 MiB", 28: "16 to 256 MiB", 64: "256 MiB and more"}  # by the bits of a size
_SIZE_OF_BITS = tuple(next(name for most, name in _SIZES.items() if bits <= most) for bits in range(65))

RoutedPath: TypeAlias = Literal["zero_sm", "hosts", "serial", "cuts", "gather", "slabs", "torch"]
"""Names the mechanism that runs a call.

`zero_sm` are copy engines (on CPUs, threads of this package), `hosts` the same inside of several hosts and torch
between them, `torch` the process group's own backend. Matmuls of tensor parallelism have `serial` and `cuts`
(`tensor/`), tokens of experts `gather` and `slabs` (`expert/`).
"""
ModuleKind: TypeAlias = Literal["fsdp2", "ddp", "tensor", "expert", "compiled"]


class CallRow(Record, frozen=True, kw_only=True):
    """Counts the calls of one operation and size class that ran on one path, and says why that path was taken."""

    operation: str
    size_class: str
    path: RoutedPath
    why: str
    calls: int


class Traffic(Record, frozen=True, kw_only=True):
    """Counts the calls of one collective of a module.

    Args:
        operation: PyTorch's name.
        calls: number of them so far.
        num_bytes: size of the whole array in the latest call: gathered parameters, or gradients before they are
            reduced.
        dtype: torch's name of the array's dtype.
        op: how gradients are combined: `avg`, `sum`, or `premul_sum` with its factor; empty for a gather.
        how: `direct` (nothing was copied in addition to sending), `in place`, or how many bytes were copied.
        torch_why: why torch runs this collective; empty: it does not.
    """

    operation: str
    calls: int = 0
    num_bytes: int = 0
    dtype: str = ""
    op: str = ""
    how: str = ""
    torch_why: str = ""

    def __str__(self) -> str:
        if self.torch_why:
            return f"torch's: {self.torch_why}"
        if not self.calls:
            return "no call yet"
        kind = " ".join(part for part in (self.dtype, self.op) if part)
        return f"{self.calls} x {self.num_bytes / 1e6:,.1f} MB {kind}, {self.how}"


class ModuleRow(Record, frozen=True, kw_only=True):
    """Reports what runs one module's communication, and why.

    Args:
        name: name of the module in the model; for compiled collectives, the name of the graph.
        kind: kind of parallelism.
        ranks: global ranks among which the module is divided.
        replicas: number of copies of the shards (HSDP); torch adds their gradients up.
        style: its style in the model's parallel plan, such as `ColwiseParallel`, or the number of experts.
        runs: what runs the module instead of torch; empty: torch runs it.
        shared_with: modules with which it shares the communication.
        traffic: what the module's collectives have moved, for FSDP2 and DDP.
        torch_why: why torch runs it; with `runs`: why torch ran the latest call that it did run.
        choice: what the tuning chose for the module, and why; empty: nothing.
        gather_bytes: for FSDP2, bytes of the module's unsharded parameters in the dtype in which they are gathered.
    """

    name: str
    kind: ModuleKind
    ranks: tuple[int, ...] = ()
    replicas: int = 1
    style: str = ""
    runs: str = ""
    shared_with: tuple[str, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    torch_why: str = ""
    choice: str = ""
    gather_bytes: int = 0

    def moved(self, operation: str) -> Traffic:
        """Return the `Traffic` of one collective of an FSDP2 module; it has 0 calls if torch runs the collective."""
        left = Traffic(operation=operation, torch_why=self.torch_why)
        return next((one for one in self.traffic if one.operation == operation), left)

    def __str__(self) -> str:
        if not self.runs:
            return f"torch's: {self.torch_why}"
        shared = ", ".join(name.rpartition(".")[2] for name in self.shared_with)
        parts = [self.runs, f"shared with {shared}" if shared else "", self.choice * (self.choice != self.torch_why)]
        left = f"; some calls torch's: {self.torch_why}" if self.torch_why else ""
        return ", ".join(part for part in parts if part) + left


class Report(Record, frozen=True, kw_only=True):
    """Reports how modules and calls run, and which tuning they follow; printing it shows tables.

    Args:
        modules: modules of FSDP2, then of DDP, tensor and expert parallelism, each in the order of the model.
        calls: counts of the calls of all operations and groups in the report, most calls first.
        tuned: the file that is followed, and how many of its choices calls had so far; empty: none is named.
        notes: lines about the whole model, such as what became of `prefetch`.
        cached_graphs: number of graphs that torch.compile took from its cache; their collectives are not listed.
    """

    modules: tuple[ModuleRow, ...] = ()
    calls: tuple[CallRow, ...] = ()
    tuned: str = ""
    notes: tuple[str, ...] = ()
    cached_graphs: int = 0

    @property
    def taken(self) -> int:
        """Return how many modules and calls counterpoint runs instead of torch."""
        return sum(bool(row.runs) for row in self.modules) + sum(row.calls for row in self.calls if row.path != "torch")

    def of_kind(self, kind: ModuleKind) -> tuple[ModuleRow, ...]:
        """Return the rows of modules with one kind of parallelism."""
        return tuple(row for row in self.modules if row.kind == kind)

    def require(self) -> Report:
        """Return this report; raise `NoEffect`, with all reasons, if torch runs everything."""
        if not self.taken and not self.cached_graphs:
            reasons = [f"{row.name}: {row.torch_why}" for row in self.modules if row.torch_why]
            reasons += [f"{r.calls} {r.operation} {r.size_class} by torch ({r.why})" for r in self.calls]
            raise NoEffect(
                "counterpoint",
                asked="calls or modules that torch does not run",
                seen="; ".join(dict.fromkeys(reasons)) or "no call",
                fix="see the reasons: larger calls, a smaller crossover_bytes, or another plan of the model",
            )
        return self

    def __str__(self) -> str:
        blocks = [_module_table(self.of_kind(kind)) for kind in ("fsdp2", "ddp", "tensor", "expert", "compiled")]
        rows = [(r.operation, r.size_class, r.path, str(r.calls), r.why) for r in self.calls]
        blocks.append(aligned_rows([("operation", "size", "path", "calls", "why"), *rows]) if rows else [])
        blocks.append([*self.notes, *([f"tuned: {self.tuned}"] if self.tuned else [])])
        return "\n\n".join("\n".join(block) for block in blocks if block)


def _module_table(rows: Sequence[ModuleRow]) -> list[str]:
    """Return a table of the modules of one kind: a line of column names, then a line for each module."""
    if not rows:
        return []
    operations = ["all_gather", "reduce_scatter"] if rows[0].kind == "fsdp2" else []
    has_style = any(row.style for row in rows)
    table = [["module", *(["style"] if has_style else []), "ranks", *(operations or ["runs"])]]
    for row in rows:
        ranks = f"{len(row.ranks)} x {row.replicas}" if row.replicas > 1 else str(len(row.ranks) or "")
        cells = [str(row.moved(name)) for name in operations] or [str(row)]
        if operations and not row.traffic:
            cells = ["torch's: as tuned"] * 2 if row.choice else [f"torch's: {row.torch_why}", "torch's"]
        table.append([row.name, *([row.style] if has_style else []), ranks, *cells])
    return aligned_rows(table)


class CallCounts:
    """Counts the calls of one group or one layer, by operation, size, path and reason."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, RoutedPath, str]] = Counter()

    def add(self, operation: str, num_bytes: int, path: RoutedPath, why: str) -> None:
        """Count a call whose full array has `num_bytes`."""
        self._counts[operation, num_bytes.bit_length(), path, why] += 1

    def rows(self) -> tuple[CallRow, ...]:
        """Return a row for each operation, size class, path and reason, most calls first."""
        total: Counter[tuple[str, str, RoutedPath, str]] = Counter()
        for (operation, bits, path, why), calls in self._counts.items():
            total[operation, _SIZE_OF_BITS[bits], path, why] += calls
        return tuple(
            CallRow(operation=operation, size_class=size, path=path, why=why, calls=calls)
            for (operation, size, path, why), calls in total.most_common()
        )


def together(rows: Iterable[CallRow]) -> tuple[CallRow, ...]:
    """Return rows of several groups or layers sorted by number of calls, most first."""
    return tuple(sorted(rows, key=lambda row: -row.calls))


def aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row of cells as a line of text, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
