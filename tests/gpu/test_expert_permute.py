"""Rows of experts on a GPU have the bits that they have on the CPU, in eager mode and in graphs."""

import sys

import pytest
import torch
from torch import Tensor

from counterpoint.parallel.expert.permute import assign, combine, narrowed, permute, weight_grads
from tests.support.command import ROOT, program
from tests.support.routing import ROUTINGS, routing

pytestmark = [pytest.mark.gpu(1), pytest.mark.needs("triton")]


def everything(ids: Tensor, x: Tensor, weights: Tensor, *, pad: int, capacity: int) -> dict[str, Tensor]:
    found = assign(ids, first_expert=16, num_experts=16, capacity=capacity, pad_multiple=pad)
    rows = permute(x, found)
    names = ("offsets", "slots", "sources", "missing")
    return {name: getattr(found, name) for name in names} | {
        "rows": rows,
        "weighted": permute(x, found, weights=weights),
        "sums": combine(rows, found),
        "weighted sums": combine(rows, found, weights=weights),
        "dots": weight_grads(rows, x, found),
    }


def inputs(kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(1111, 720, generator=dice).to(dtype)
    return routing(kind, 1111, 6, 48, seed), x, torch.rand(1111, 6, generator=dice)


def compare(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        if name == "dots":
            torch.testing.assert_close(got[name].cpu(), value, rtol=1e-4, atol=1e-3)
        else:
            assert torch.equal(got[name].cpu(), value), name


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("pad", "capacity"), [(1, 6666), (16, 6912), (16, 1024)])
def test_the_bits_of_the_cpu(kind: str, dtype: torch.dtype, pad: int, capacity: int) -> None:
    """Whatever the routing, with padding, and where the capacity is too small."""
    given = inputs(kind, dtype)
    wanted = everything(*given, pad=pad, capacity=capacity)
    ids, x, weights = (tensor.cuda() for tensor in given)
    compare(everything(ids, x, weights, pad=pad, capacity=capacity), wanted)


@pytest.mark.parametrize("hidden", [1, 720, 8192, 9000])
def test_tokens_are_as_narrow_as_on_the_cpu(hidden: int) -> None:
    x = torch.randn(333, hidden).bfloat16()
    x[7] = 0
    wanted, got = narrowed(x, torch.float8_e4m3fn), narrowed(x.cuda(), torch.float8_e4m3fn)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def test_a_graph_follows_its_ids() -> None:
    """Three replays with other ids and tokens: nothing of the capture is left."""
    ids, x, weights = (tensor.cuda() for tensor in inputs("distinct", torch.bfloat16))
    everything(ids, x, weights, pad=16, capacity=6912)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything(ids, x, weights, pad=16, capacity=6912)
    for seed, kind in enumerate(("zipf", "one-hot", "distinct"), 1):
        given = inputs(kind, torch.bfloat16, seed)
        for tensor, value in zip((ids, x, weights), given, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        compare(got, everything(*given, pad=16, capacity=6912))


def test_the_benchmark_in_small() -> None:
    command = [sys.executable, "benchmarks/expert_permute.py", "--shapes", "tiny", "--routings", "uniform", "zipf"]
    done = program(command, folder=ROOT, timeout_s=220)
    assert done.returncode == 0, done.stdout + done.stderr
