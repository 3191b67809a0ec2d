"""Graphs of torch.compile give with fused matmuls what they gave before, and nothing of torch's collectives is left."""

import importlib
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from counterpoint.measurement.session import Session
from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.report import Report
from counterpoint.parallel.tensor.compiled import fuse_compiled
from counterpoint.parallel.tensor.group import tensor_group
from tests.support.ranks import Ranks
from tests.support.tensor_graphs import CASES, fused, operations_of

HIDDEN, HEADS, KV_HEADS, FFN = 32, 4, 2, 48


def both_results(session: Session, name: str) -> list[tuple[Tensor, Tensor]]:
    case = CASES[name]
    graphs = fused(case, session.rank)
    pairs = []
    for module in (graphs.before, graphs.after):
        out = module(*case.inputs(session.rank))
        pairs.append([out] if isinstance(out, Tensor) else list(out))
    return list(zip(*pairs, strict=True))


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        kv = HIDDEN // HEADS * KV_HEADS
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, kv, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        out: Tensor = self.o((weights @ v).transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=bias) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(HIDDEN), Attention(bias)
        self.norm2, self.ffn = nn.RMSNorm(HIDDEN), FeedForward(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


def _plan(sequence: bool) -> dict[str, ParallelStyle]:
    out = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    columns = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {"attention.o": out, "ffn.down": out}
    if sequence:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"norm": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "ffn": gather}
    return plan


class _Keep(CustomGraphPass):
    def __init__(self) -> None:
        self.counts: list[Counter[str]] = []

    def __call__(self, graph: Any) -> None:
        self.counts.append(operations_of(graph))

    def uuid(self) -> Any:
        return None  # nothing is cached


def trained(
    session: Session, bias: bool, sequence: bool, batch: int, pieces: bool
) -> tuple[list[Tensor], list[Tensor], Report, list[Counter[str]], set[str]]:
    """Results and gradients of a block, eager and then compiled with what is fused; the report, and what is left.

    With `pieces` all operations go beside copies between the ranks, of which float64 has no model; else torch's way.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    dtype = torch.float32 if pieces else torch.float64
    block = Block(bias).to(dtype)
    parallelize_module(block, mesh, _plan(sequence))
    torch.manual_seed(1 + (session.rank if sequence else 0))
    x = torch.randn(batch, 8, HIDDEN, dtype=dtype)

    def step(run: Any) -> list[Tensor]:
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out = out.to_local() if isinstance(out, DTensor) else out
        out.square().mean().backward()
        gradients: list[Any] = [leaf.grad, *(one.grad for one in block.parameters())]
        return [out.detach(), *(one.to_local() if isinstance(one, DTensor) else one for one in gradients)]

    expected = step(block)
    kept = _Keep()
    _import_inductor()
    torch._dynamo.reset()
    options = TensorOptions(mechanism="cuts" if pieces else "torch", measure=False)
    group = tensor_group(mesh.get_group().group_name, options)
    with config.patch(post_grad_custom_post_pass=kept), fuse_compiled([mesh]) as handle:
        results = step(torch.compile(block))
    group.close()
    return expected, results, handle.report(), kept.counts, {row.path for row in group.report().calls}


def compiled_thrice(session: Session) -> tuple[list[Report], list[Tensor]]:
    """Reports of one function: compiled, taken from inductor's cache, and compiled for no group."""
    _import_inductor()
    case = CASES["three weights"]
    inputs = case.inputs(session.rank)
    reports, results = [], [torch.cat(case.function(*inputs), dim=-1)]
    with fresh_cache(), torch.no_grad():
        for groups in (None, None, ()):
            torch._dynamo.reset()
            with fuse_compiled(groups) as handle:
                results.append(torch.cat(torch.compile(case.function)(*inputs), dim=-1))
            reports.append(handle.report())
    return reports, results


def _import_inductor() -> None:
    with warnings.catch_warnings():  # torch's own import of TorchScript
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.runs])
def test_small_graphs_give_the_same(two_ranks: Ranks, name: str) -> None:
    """Bit by bit, as their numbers are whole."""
    for pairs in two_ranks.run(both_results, name):
        assert pairs
        for before, after in pairs:
            assert before.dtype == after.dtype
            assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("bias", "sequence", "batch", "pieces"),
    [(True, True, 2, False), (False, True, 1, True), (True, False, 2, False)],
    ids=["sequence parallel", "a batch of one, in pieces", "replicated"],
)
def test_a_compiled_block_gives_the_same_without_torchs_collectives(
    two_ranks: Ranks, bias: bool, sequence: bool, batch: int, pieces: bool
) -> None:
    """Forward and backward, by inductor; the gathers of q, k and v are one, so are the sums of their gradients."""
    for expected, results, report, counts, paths in two_ranks.run(trained, bias, sequence, batch, pieces):
        assert paths <= ({"cuts", "serial"} if pieces else {"torch"})
        rtol, atol = (1e-5, 1e-6) if pieces else (1e-12, 1e-14)
        assert len(expected) == len(results) > 9
        for one, other in zip(expected, results, strict=True):
            torch.testing.assert_close(other, one, rtol=rtol, atol=atol)
        forward, backward = (dict(one) for one in counts)
        if sequence:
            gather, scatter = "counterpoint::all_gather_matmul", "counterpoint::matmul_reduce_scatter"
            assert backward == {gather: 2, scatter: 2}
            if bias:
                gather, scatter = "counterpoint::all_gather_linear", "counterpoint::linear_reduce_scatter"
            assert forward == {gather: 2, scatter: 2}
            matmuls = [3, 1, 2, 1, 1, 2, 1, 3]
        else:
            assert forward == {"counterpoint::linear_all_reduce": 2}
            assert backward == {"counterpoint::matmul_all_reduce": 2}
            matmuls = [1, 1, 2, 3]
        assert [int(row.runs.split()[0]) for row in report.require().modules] == matmuls
        assert {row.name.split()[0] for row in report.modules} == {"forward", "backward"}


def test_a_graph_from_inductors_cache_is_as_it_was_fused(two_ranks: Ranks) -> None:
    """Another choice of groups is not taken from the cache."""
    for (first, second, third), (expected, *results) in two_ranks.run(compiled_thrice):
        assert [row.runs for row in first.require().modules] == ["3 matmuls"]
        kinds = [row.name.split()[0] for row in first.modules]
        assert kinds in (["inference"], ["forward"])  # torch 2.11 does not tell them apart
        assert (first.cached_graphs, second.cached_graphs, third.cached_graphs) == (0, 1, 0)
        assert second.require().modules == ()
        assert [row.torch_why for row in third.modules] == ["its group is not one of those to fuse"]
        for result in results:
            assert torch.equal(result, expected)
