"""Fuse matmuls with their collectives in what torch.compile compiles, by one line before the first call.

    fused = counterpoint.tensor_parallel.fuse_compiled()
    model = torch.compile(model)
    ...  # a step
    print(fused.report().require())

It is a pass of inductor (`post_grad_custom_pre_pass`); `graphs.py` has what it does to a graph. A pass that was set
before runs first, as it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch._dynamo.utils import counters
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from counterpoint.errors import Misconfigured, NoEffect
from counterpoint.parallel.tables import aligned_rows
from counterpoint.parallel.tensor import graphs, operations
from counterpoint.parallel.tensor.graphs import FoundCollective, fuse
from counterpoint.version import VERSION

_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)  # torch >= 2.12


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCollective:
    """Says what became of a collective of a compiled graph.

    Args:
        graph: number of the graph, in the order in which they were compiled.
        kind: of the graph.
        found: the collective, and with how many matmuls it was fused.
    """

    graph: int
    kind: Literal["forward", "backward", "inference"]
    found: FoundCollective


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledReport:
    """Lists the collectives of the graphs that were compiled. Prints as a table.

    Args:
        rows: all_gathers, reduce_scatters and all_reduces, in the order of their graphs.
        cached: graphs that came from inductor's cache on disk, as they were fused when they were compiled; their
            collectives are not listed.
    """

    rows: tuple[CompiledCollective, ...]
    cached: int = 0

    @property
    def fused(self) -> int:
        """Return how many collectives were fused with matmuls."""
        return sum(row.found.matmuls > 0 for row in self.rows)

    def require(self) -> CompiledReport:
        """Return this report; raise `NoEffect`, with all reasons, if nothing was fused."""
        if not self.fused and not self.cached:
            reasons = (f"{row.found.collective} of {row.kind} graph {row.graph}: {row.found.why}" for row in self.rows)
            raise NoEffect(
                "tensor_parallel.fuse_compiled",
                asked="collectives fused with matmuls",
                seen="; ".join(reasons) or "no graph with an all_gather, a reduce_scatter or an all_reduce",
                fix="call it before the model's first call; matmuls and collectives have to be in one graph",
            )
        return self

    def __str__(self) -> str:
        head = ("graph", "kind", "collective", "group", "tensor", "fused with")
        rows = [
            (str(row.graph), row.kind, row.found.collective, row.found.group, row.found.tensor, _outcome(row.found))
            for row in self.rows
        ]
        lines = aligned_rows([head, *rows])
        lines.append(f"{self.fused} of {len(self.rows)} collectives fused")
        if self.cached:
            lines.append(f"{self.cached} graphs came from inductor's cache, fused before; they are not listed")
        return "\n".join(lines)


def _outcome(found: FoundCollective) -> str:
    if not found.matmuls:
        return f"nothing: {found.why}"
    return "1 matmul" if found.matmuls == 1 else f"{found.matmuls} matmuls"


def fuse_compiled(groups: Sequence[ProcessGroup | DeviceMesh] | None = None) -> FusedCompilations:
    """Fuse matmuls with their collectives in all that torch.compile compiles from now on. All ranks call it.

    What was compiled before stays as it is.

    Args:
        groups: process groups, or meshes of one dimension, whose collectives may be fused; None: all. With FSDP that
            is compiled too, give the mesh of tensor parallelism.

    Returns:
        A handle that reports, and takes the pass out; it need not be kept.

    Raises:
        Misconfigured: a mesh has several dimensions, or it was called before without `remove`.
    """
    return FusedCompilations(None if groups is None else frozenset(map(_name_of, groups)))


class FusedCompilations:
    """Reports what was fused, and takes the pass out of inductor: by `remove`, or at the end of a `with` block."""

    def __init__(self, groups: frozenset[str] | None) -> None:
        before = config.post_grad_custom_pre_pass
        passes = () if before is None else tuple(before) if isinstance(before, list | tuple) else (before,)
        if any(isinstance(one, _FusingPass) and one.is_on for one in passes):
            raise Misconfigured("fuse_compiled was called already: call remove() of what it returned before")
        self._before = before
        self._pass = _FusingPass(passes, groups)
        self._hits = _cache_hits()
        config.post_grad_custom_pre_pass = self._pass

    def __enter__(self) -> FusedCompilations:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> CompiledReport:
        """Return the collectives of all graphs that were compiled so far."""
        return CompiledReport(rows=tuple(self._pass.rows), cached=_cache_hits() - self._hits)

    def remove(self) -> None:
        """Fuse nothing from now on; graphs that are compiled stay as they are."""
        self._pass.is_on = False
        if config.post_grad_custom_pre_pass is self._pass:  # else another pass was put around it
            config.post_grad_custom_pre_pass = self._before


class _FusingPass(_InferenceAware):  # type: ignore[misc]
    """Runs the passes that were set before, then fuses."""

    def __init__(self, before: tuple[Any, ...], groups: frozenset[str] | None) -> None:
        self.before, self.groups = before, groups
        self.is_on = True
        self.rows: list[CompiledCollective] = []
        self._graphs = 0

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for one in self.before:
            if _InferenceAware is not CustomGraphPass and isinstance(one, _InferenceAware):
                one(graph, is_inference=is_inference)
            else:
                one(graph)
        if not self.is_on:
            return
        has_tangents = any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
        kind: Literal["forward", "backward", "inference"] = "backward" if has_tangents else "forward"
        kind = "inference" if is_inference else kind
        self._graphs += 1
        self.rows += [
            CompiledCollective(graph=self._graphs, kind=kind, found=found) for found in fuse(graph, self.groups)
        ]

    def uuid(self) -> Any:
        """Return what inductor's cache must know of this pass; None, if one set before is not to be cached."""
        before = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.before]
        if not all(before):
            return None
        groups = None if self.groups is None else tuple(sorted(self.groups))
        code = get_hash_for_files((str(graphs.__file__), str(operations.__file__)))
        return "counterpoint", VERSION, code, groups, self.is_on, tuple(before)


def _name_of(group: ProcessGroup | DeviceMesh) -> str:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise Misconfigured(f"a mesh of {group.ndim} dimensions: give one of its axes, such as mesh['tp']")
        group = group.get_group()
    return str(group.group_name)


def _cache_hits() -> int:
    """Return how many graphs inductor took from its cache; autograd's cache counts those that it bundles."""
    return max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
