"""What reports say that ran in the place of torch."""

import msgspec
import pytest

from counterpoint.errors import NoEffect
from counterpoint.parallel.report import CallCounts, ModuleRow, Report, Traffic

GATHER = Traffic(operation="all_gather", calls=2, num_bytes=16_000_000, dtype="bfloat16", how="in place")
SCATTER = Traffic(
    operation="reduce_scatter", calls=1, num_bytes=32_000_000, dtype="float32", op="avg", how="4.0 MB copied"
)
NONE = (Traffic(operation="all_gather"), Traffic(operation="reduce_scatter"))
SHARDED = (
    ModuleRow(name="(root)", kind="fsdp2", ranks=(0, 1), gather_bytes=99, torch_why="one rank"),
    ModuleRow(name="layers.0", kind="fsdp2", ranks=(0, 1), runs="zero_sm", traffic=(GATHER, SCATTER)),
    ModuleRow(name="layers.1", kind="fsdp2", ranks=(0, 1), replicas=4, runs="zero_sm", traffic=NONE),
)
LINEAR = ModuleRow(
    name="ffn.up", kind="tensor", style="ColwiseParallel", ranks=(0, 1), runs="all_gather_matmul",
    shared_with=("ffn.gate",), torch_why="its input has one dimension",
)  # fmt: skip
LEFT = ModuleRow(name="head", kind="tensor", style="Embedding", torch_why="it is no nn.Linear")
EXPERTS = ModuleRow(name="experts", kind="expert", ranks=(0, 1), runs="in 2 parts", choice="slabs by tuning: so")


def counted() -> CallCounts:
    """Two sizes of one class, and a call that torch makes."""
    counts = CallCounts()
    for num_bytes in (1 << 24, 1 << 25, 3 << 24):
        counts.add("all_reduce", num_bytes, "zero_sm", "in place")
    counts.add("all_gather", 0, "torch", "below the crossover")
    return counts


def test_modules_of_fsdp2_are_a_table() -> None:
    assert str(Report(modules=SHARDED, notes=("prefetch: 1 ahead",), tuned="a.toml: 1 of 2")).splitlines() == [
        "module    ranks  all_gather                      reduce_scatter",
        "(root)    2      torch's: one rank               torch's",
        "layers.0  2      2 x 16.0 MB bfloat16, in place  1 x 32.0 MB float32 avg, 4.0 MB copied",
        "layers.1  2 x 4  no call yet                     no call yet",
        "",
        "prefetch: 1 ahead",
        "tuned: a.toml: 1 of 2",
    ]


def test_each_kind_and_the_calls_have_a_table() -> None:
    text = str(Report(modules=(LINEAR, LEFT, EXPERTS), calls=counted().rows()))
    assert text.splitlines() == [
        "module  style            ranks  runs",
        "ffn.up  ColwiseParallel  2      all_gather_matmul, shared with gate; "
        "some calls torch's: its input has one dimension",
        "head    Embedding               torch's: it is no nn.Linear",
        "",
        "module   ranks  runs",
        "experts  2      in 2 parts, slabs by tuning: so",
        "",
        "operation   size           path     calls  why",
        "all_reduce  16 to 256 MiB  zero_sm  3      in place",
        "all_gather  below 1 MiB    torch    1      below the crossover",
    ]


def test_it_is_data() -> None:
    report = Report(modules=(*SHARDED, LINEAR), calls=counted().rows(), tuned="x", notes=("y",))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_require_says_why_torch_runs_all_of_it() -> None:
    for enough in (Report(modules=(LINEAR,)), Report(calls=counted().rows()), Report(cached_graphs=1)):
        assert enough.require() is enough
    left = Report(modules=(LEFT, SHARDED[0]), calls=counted().rows()[1:])
    with pytest.raises(NoEffect, match=r"head: it is no nn.Linear; \(root\): one rank; 1 all_gather below 1 MiB by"):
        left.require()
    with pytest.raises(NoEffect, match="saw no call"):
        Report().require()
