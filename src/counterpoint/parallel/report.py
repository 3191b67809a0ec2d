"""Hold what `overlap` did to each module of FSDP2, tensor and expert parallelism: what was replaced, what was not."""

from __future__ import annotations

from counterpoint.parallel.backend.report import BackendReport, RoutedCalls
from counterpoint.parallel.tables import aligned_rows
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
        gather_choice: what the tuning chose for the gather, and why; empty: nothing.
        scatter_choice: what it chose for the reduce_scatter, and why; empty: nothing.
        torch_why: why torch's own collectives both stay; empty if they do not.
        copied_why: why FSDP2 copies what ours have gathered; empty if it does not.
    """

    name: str
    ranks: tuple[int, ...]
    gather_bytes: int
    replicas: int = 1
    all_gather: HookTraffic | None = None
    reduce_scatter: HookTraffic | None = None
    gather_choice: str = ""
    scatter_choice: str = ""
    torch_why: str = ""
    copied_why: str = ""


class TensorParallelModule(Record, frozen=True, kw_only=True):
    """Reports one module of tensor parallelism.

    Args:
        name: in the model.
        style: name of the style in the plan.
        ranks: over which it is parallel, counted in the job.
        operation: of `torch.ops.counterpoint`, which takes the place of collective and matmul; empty: none does.
        shared_with: modules with which it shares the communication.
        torch_why: why torch runs it; with an `operation`: why torch ran the latest call that it did run.
    """

    name: str
    style: str
    ranks: tuple[int, ...] = ()
    operation: str = ""
    shared_with: tuple[str, ...] = ()
    torch_why: str = ""

    def __str__(self) -> str:
        shared = ", ".join(name.rpartition(".")[2] for name in self.shared_with)
        shared = f", shared with {shared}" if shared else ""
        if not self.operation:
            return f"torch's: {self.torch_why}"
        return f"{self.operation}{shared}" + (f"; some calls torch's: {self.torch_why}" if self.torch_why else "")


class TensorParallelReport(Record, frozen=True, kw_only=True):
    """Reports all modules of tensor parallelism of a model. Prints as a table.

    Args:
        modules: in the order of `named_modules`.
        calls: of the operations on these ranks so far, and which way they went.
    """

    modules: tuple[TensorParallelModule, ...]
    calls: tuple[RoutedCalls, ...] = ()

    def __str__(self) -> str:
        rows = [(one.name, one.style, str(len(one.ranks) or ""), str(one)) for one in self.modules]
        lines = aligned_rows([("module", "style", "ranks", "operation"), *rows])
        return "\n".join([*lines, "", str(BackendReport(self.calls))] if self.calls else lines)


class ExpertParallelModule(Record, frozen=True, kw_only=True):
    """Reports one module of expert parallelism.

    Args:
        name: in the model.
        style: what brought the tokens before, in `transformers`.
        ranks: among which the experts are divided, counted in the job.
        experts: of all ranks.
        parts: into which tokens are cut; 0: no dispatcher runs it.
        choice: what the tuning chose in the latest call, and why; empty: nothing.
        torch_why: why it was left as it was; with `parts`: why the latest call was that was.
    """

    name: str
    style: str = ""
    ranks: tuple[int, ...] = ()
    experts: int = 0
    parts: int = 0
    choice: str = ""
    torch_why: str = ""

    @property
    def where(self) -> str:
        """Return how many experts are on how many ranks."""
        return f"{self.experts} on {len(self.ranks)} ranks" if self.parts else ""

    def __str__(self) -> str:
        if not self.parts:
            return f"as it was: {self.torch_why}"
        choice = f", {self.choice}" if self.choice and self.choice != self.torch_why else ""
        return f"in {self.parts} parts{choice}" + (
            f"; some calls as it was: {self.torch_why}" if self.torch_why else ""
        )


class ExpertParallelReport(Record, frozen=True, kw_only=True):
    """Reports all modules of expert parallelism of a model. Prints as a table.

    Args:
        modules: in the order of `named_modules`, those that were left at the end.
        calls: of the dispatchers so far, and which way they went.
    """

    modules: tuple[ExpertParallelModule, ...]
    calls: tuple[RoutedCalls, ...] = ()

    def __str__(self) -> str:
        rows = [(one.name, one.style, one.where, str(one)) for one in self.modules]
        lines = aligned_rows([("module", "style", "experts", "tokens"), *rows])
        return "\n".join([*lines, "", str(BackendReport(self.calls))] if self.calls else lines)


class OverlapReport(Record, frozen=True, kw_only=True):
    """Reports all FSDP2 modules of a model. Prints as a table.

    Args:
        modules: in the order of `named_modules`.
        prefetch: what became of `OverlapOptions.prefetch`; empty if it was not given.
        unmanaged_bytes: size of parameters that FSDP2 does not manage: nothing gathers or scatters them.
        tuned: which file is followed, and how many of its choices so far; empty: none is named.
        tensor_parallel: None if the model is not tensor parallel.
        expert_parallel: None if the model is not expert parallel, as `transformers` is.
    """

    modules: tuple[OverlappedModule, ...]
    prefetch: str = ""
    unmanaged_bytes: int = 0
    tuned: str = ""
    tensor_parallel: TensorParallelReport | None = None
    expert_parallel: ExpertParallelReport | None = None

    def __str__(self) -> str:
        rows = [("module", "ranks", "all_gather", "reduce_scatter"), *map(_cells, self.modules)]
        lines = aligned_rows(rows) if self.modules else []
        lines += [f"{module.name}: FSDP2 copies: {module.copied_why}" for module in self.modules if module.copied_why]
        if any(module.replicas > 1 for module in self.modules):
            lines.append("all_reduce between replicas: torch's")
        if self.prefetch:
            lines.append(f"prefetch: {self.prefetch}")
        if self.unmanaged_bytes:
            lines.append(f"{self.unmanaged_bytes / 1e6:,.1f} MB of parameters are in no FSDP2 module")
        lines += _choices(self.modules)
        if self.tuned:
            lines.append(f"tuned: {self.tuned}")
        for report in (self.tensor_parallel, self.expert_parallel):
            if report is not None:
                lines += ["", str(report)] if lines else [str(report)]
        return "\n".join(lines)


def _choices(modules: tuple[OverlappedModule, ...]) -> list[str]:
    """Return a line for each choice of a tuning, with the modules that follow it."""
    names: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        for operation, choice in (("all_gather", module.gather_choice), ("reduce_scatter", module.scatter_choice)):
            if choice:
                names.setdefault((operation, choice), []).append(module.name)
    return [
        f"{operation} of {these[0]}{f' and {len(these) - 1} more' if these[1:] else ''}: {choice}"
        for (operation, choice), these in names.items()
    ]


def _cells(module: OverlappedModule) -> tuple[str, ...]:
    hooks = (module.all_gather, module.reduce_scatter)
    by_tuning = "torch's, as tuned"
    own = (
        by_tuning if module.gather_choice else f"torch's: {module.torch_why}",
        by_tuning if module.scatter_choice else "torch's",
    )
    shown = (text if hook is None else str(hook) for hook, text in zip(hooks, own, strict=True))
    ranks = f"{len(module.ranks)} x {module.replicas}" if module.replicas > 1 else str(len(module.ranks))
    return (module.name, ranks, *shown)
