"""Hold what `overlap` did: which collectives of each FSDP2 module were replaced, and what they have moved."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.records import Record


class HookTraffic(Record, frozen=True, kw_only=True):
    """Counts the calls of one hook.

    Args:
        calls: how many so far.
        num_bytes: size of the whole array in the latest of them: gathered parameters, or gradients before they are
            reduced.
        dtype: torch's name of it.
        op: how gradients are combined: `avg`, `sum`, or `premul_sum` with its factor; empty for a gather.
        copied_bytes: what the latest call copied in addition to sending it: 0 if it was in place.
        direct: FSDP2 copied nothing either: parameters came to where they are used, gradients went from where they are.
    """

    calls: int = 0
    num_bytes: int = 0
    dtype: str = ""
    op: str = ""
    copied_bytes: int = 0
    direct: bool = False

    def __str__(self) -> str:
        if not self.calls:
            return "no call yet"
        how = f"{self.copied_bytes / 1e6:,.1f} MB copied" if self.copied_bytes else "in place"
        how = "direct" if self.direct else how
        kind = " ".join(part for part in (self.dtype, self.op) if part)
        return f"{self.calls} x {self.num_bytes / 1e6:,.1f} MB {kind}, {how}"


class OverlappedModule(Record, frozen=True, kw_only=True):
    """Reports one FSDP2 module.

    Args:
        name: in the model.
        ranks: over which it is sharded, counted in the job.
        replicas: how many copies of the shards there are (HSDP); torch adds their gradients up.
        gather_bytes: size of its whole parameters in the dtype in which they are gathered.
        all_gather: what the hook has done; None if torch's own collective is in use.
        reduce_scatter: what the hook has done; None if torch's own collective is in use.
        torch_why: why torch's own collectives stay; empty if they do not.
        copied_why: why FSDP2 copies what ours have gathered; empty if it does not.
    """

    name: str
    ranks: tuple[int, ...]
    gather_bytes: int
    replicas: int = 1
    all_gather: HookTraffic | None = None
    reduce_scatter: HookTraffic | None = None
    torch_why: str = ""
    copied_why: str = ""


class OverlapReport(Record, frozen=True, kw_only=True):
    """Reports all FSDP2 modules of a model. Prints as a table.

    Args:
        modules: in the order of `named_modules`.
        prefetch: what became of `OverlapOptions.prefetch`; empty if it was not given.
        unmanaged_bytes: size of parameters that FSDP2 does not manage: nothing gathers or scatters them.
    """

    modules: tuple[OverlappedModule, ...]
    prefetch: str = ""
    unmanaged_bytes: int = 0

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
