"""What `overlap` did, as data: which collectives of each FSDP2 module were replaced, and what they have moved."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.records.base import Record

__all__ = ["HookTraffic", "OverlapReport", "OverlappedModule"]


class HookTraffic(Record, frozen=True, kw_only=True):
    """Counts the calls of one hook."""

    calls: int = 0  # so far
    num_bytes: int = 0
    """Of the whole array in the latest call: gathered parameters, or gradients before they are reduced."""
    dtype: str = ""  # torch's name of it
    op: str = ""  # how gradients are combined: `avg`, `sum`, or `premul_sum` with its factor; empty for a gather
    copied_bytes: int = 0  # by the latest call in addition to sending: 0 if it was in place
    direct: bool = False  # FSDP2 copied nothing either: parameters came to their places, gradients went from theirs

    def __str__(self) -> str:
        if not self.calls:
            return "no call yet"
        how = f"{self.copied_bytes / 1e6:,.1f} MB copied" if self.copied_bytes else "in place"
        how = "direct" if self.direct else how
        kind = " ".join(part for part in (self.dtype, self.op) if part)
        return f"{self.calls} x {self.num_bytes / 1e6:,.1f} MB {kind}, {how}"


class OverlappedModule(Record, frozen=True, kw_only=True):
    """Reports one FSDP2 module."""

    name: str  # in the model
    ranks: tuple[int, ...]  # over which it is sharded, counted in the job
    gather_bytes: int  # size of its whole parameters in the dtype in which they are gathered
    replicas: int = 1  # how many copies of the shards there are (HSDP); torch adds their gradients up
    all_gather: HookTraffic | None = None  # what the hook has done; None if torch's own collective is in use
    reduce_scatter: HookTraffic | None = None  # what the hook has done; None if torch's own collective is in use
    torch_why: str = ""  # why torch's own collectives stay; empty if they do not
    copied_why: str = ""  # why FSDP2 copies what ours have gathered; empty if it does not


class OverlapReport(Record, frozen=True, kw_only=True):
    """Reports all FSDP2 modules of a model. Prints as a table."""

    modules: tuple[OverlappedModule, ...]  # in the order of `named_modules`
    prefetch: str = ""  # what became of `OverlapOptions.prefetch`; empty if it was not given
    unmanaged_bytes: int = 0  # size of parameters that FSDP2 does not manage: nothing gathers or scatters them

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("module", "ranks", "all_gather", "reduce_scatter"), *map(_cells, self.modules)]
        lines = _aligned_rows(rows)
        lines += [f"{module.name}: FSDP2 copies: {module.copied_why}" for module in self.modules if module.copied_why]
        if any(module.replicas > 1 for module in self.modules):
            lines.append("all_reduce between replicas: torch's")
        if self.prefetch:
            lines.append(f"prefetch: {self.prefetch}")
        if self.unmanaged_bytes:
            lines.append(f"{self.unmanaged_bytes / 1e6:,.1f} MB of parameters are in no FSDP2 module")
        return "\n".join(lines)


def _cells(module: OverlappedModule) -> tuple[str, ...]:
    hooks = (module.all_gather, module.reduce_scatter)
    own = (f"torch's: {module.torch_why}", "torch's")
    shown = (text if hook is None else str(hook) for hook, text in zip(hooks, own, strict=True))
    ranks = f"{len(module.ranks)} x {module.replicas}" if module.replicas > 1 else str(len(module.ranks))
    return (module.name, ranks, *shown)


def _aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
