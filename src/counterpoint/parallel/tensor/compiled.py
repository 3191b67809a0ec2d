"""Fuse matmuls with their collectives in graphs of torch.compile, by calling `fuse_compiled` before.

    fused = counterpoint.tensor_parallel.fuse_compiled()
    model = torch.compile(model)
    ...  # a step
    print(fused.report().require())

This sets a pass of inductor (`post_grad_custom_pre_pass`); `fx_fusion.py` changes the graphs. A pass that was set
before runs first, as it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch._dynamo.utils import counters
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from counterpoint.errors import Misconfigured
from counterpoint.parallel.report import ModuleRow, Report
from counterpoint.parallel.tensor import fx_fusion, operations
from counterpoint.parallel.tensor.fx_fusion import fuse
from counterpoint.version import VERSION

_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)  # torch >= 2.12


def fuse_compiled(groups: Sequence[ProcessGroup | DeviceMesh] | None = None) -> FusedCompilations:
    """Fuse matmuls with their collectives in all graphs that torch.compile compiles from now on. All ranks call this.

    Graphs that are compiled already stay as they are.

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
    """Reports the fused matmuls; `remove`, or the end of a `with` block, takes the fusing pass out of inductor."""

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

    def report(self) -> Report:
        """Return a report of collectives in compiled graphs; `runs` says how many matmuls each is fused with.

        Graphs that came from inductor's cache on disk are as they were fused when they were compiled: a note counts
        them, and their collectives are not listed.
        """
        rows, cached = tuple(self._pass.rows), _cache_hits() - self._hits
        notes = [f"{sum(bool(row.runs) for row in rows)} of {len(rows)} collectives fused"]
        if cached:
            notes.append(f"{cached} graphs came from inductor's cache, fused before; they are not listed")
        return Report(modules=rows, notes=tuple(notes), cached_graphs=cached)

    def remove(self) -> None:
        """Take the fusing pass out of inductor; graphs that are compiled already stay fused."""
        self._pass.is_on = False
        if config.post_grad_custom_pre_pass is self._pass:  # otherwise another pass was put around this one
            config.post_grad_custom_pre_pass = self._before


class _FusingPass(_InferenceAware):  # type: ignore[misc]
    """Runs the inductor pass that was set before, then fuses matmuls with their collectives."""

    def __init__(self, before: tuple[Any, ...], groups: frozenset[str] | None) -> None:
        self.before, self.groups = before, groups
        self.is_on = True
        self.rows: list[ModuleRow] = []
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
            ModuleRow(
                name=f"{kind} graph {self._graphs}",
                kind="compiled",
                style=f"{found.collective} of {found.tensor} in group {found.group}",
                runs="" if not found.matmuls else "1 matmul" if found.matmuls == 1 else f"{found.matmuls} matmuls",
                torch_why=found.why,
            )
            for found in fuse(graph, self.groups)
        ]

    def uuid(self) -> Any:
        """Return this pass's key in inductor's cache; None if an earlier pass forbids caching."""
        before = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.before]
        if not all(before):
            return None
        groups = None if self.groups is None else tuple(sorted(self.groups))
        code = get_hash_for_files((str(fx_fusion.__file__), str(operations.__file__)))
        return "counterpoint", VERSION, code, groups, self.is_on, tuple(before)


def _name_of(group: ProcessGroup | DeviceMesh) -> str:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise Misconfigured(f"a mesh of {group.ndim} dimensions: give one of its axes, such as mesh['tp']")
        group = group.get_group()
    return str(group.group_name)


def _cache_hits() -> int:
    """Return the number of graphs that came from inductor's cache, also as part of an entry of autograd's cache."""
    return max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
