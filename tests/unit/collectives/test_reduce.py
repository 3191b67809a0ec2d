"""Reductions: what may be asked for, how it is launched, and that the kernel gives the bits that plain torch gives.

The kernel runs in Triton's interpreter and is compiled for Hopper, each in one process for all cases; where Triton (or
a numpy that its interpreter works with) is not installed these tests are skipped.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.collectives.cpu.call import reference
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sum_launch import Layout, launch_of
from counterpoint.collectives.program.operations import all_reduce, plan
from counterpoint.collectives.program.reductions import Reduction, ReductionOp
from counterpoint.collectives.program.steps import Reduce
from counterpoint.errors import Misconfigured


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_is_as_exact_as_its_dtype(dtype: str) -> None:
    """Against float64 the sum of 8 is off by half a unit in the last place plus float32's own error: it rounds once."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(4000, generator=draw).to(getattr(torch, dtype)) for _ in range(8)]
    exact = sum(row.double() for row in rows)
    assert isinstance(exact, torch.Tensor)
    size = sum(row.double().abs() for row in rows)
    got = reference(rows, Reduction(op="sum", dtype=dtype)).double()
    allowed = torch.finfo(getattr(torch, dtype)).eps / 2 * exact.abs() * (1 + 1e-6) + 8 * 2**-24 * size
    assert ((got - exact).abs() <= allowed).all()


def test_integers_are_exact() -> None:
    rows = [torch.full((3,), 2**31 - 1, dtype=torch.int32), torch.tensor([1, 2, -1], dtype=torch.int32)]
    assert torch.equal(reference(rows, Reduction(op="sum", dtype="int32")), rows[0] + rows[1])


def test_order_is_that_of_the_ranks() -> None:
    """(1e8 + 1) - 1e8 in float32 is 0 in this order, and 1 in another: the order is fixed."""
    rows = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    assert reference(rows, Reduction(op="sum", dtype="float32")).item() == 0.0


@given(own=st.integers(0, 7), count=st.integers(1, 8), stride=st.integers(1, 1 << 30), where=st.integers(0, 1 << 40))
def test_any_own_place_is_found(own: int, count: int, stride: int, where: int) -> None:
    slots = [(1 << 41) + slot * stride for slot in range(count - 1)]
    index = min(own, count - 1)
    sources = [*slots[:index], where, *slots[index:]]
    layout = Layout.of(sources)
    again = [layout.staged + slot * layout.stride for slot in range(count - 1)]
    assert [*again[: layout.own_index], layout.own, *again[layout.own_index :]] == sources


@pytest.mark.parametrize("world_size", range(2, 9))
def test_the_kernel_can_do_what_programs_ask_for(world_size: int) -> None:
    bases = {"input": 1 << 40, "output": 1 << 41, "staging": 1 << 42}
    for rank in range(world_size):
        program = plan(all_reduce(world_size, 4096), rank)
        reduces = [step for step in program.steps if isinstance(step, Reduce)]
        for step in reduces:
            sources = [bases[span.buffer] + span.offset for span in step.sources]
            found = Layout.of(sources)
            slots = [found.staged + slot * found.stride for slot in range(world_size - 1)]
            own, others = found.own_index, [source for source in range(world_size) if source != found.own_index]
            assert [sources[source] for source in others] == slots
            assert sources[own] == found.own
        assert reduces


def test_scattered_sources_are_refused() -> None:
    with pytest.raises(Misconfigured, match="evenly spaced"):
        Layout.of([0, 1000, 1010, 5000, 7777])


@pytest.mark.parametrize(
    ("op", "dtype", "factor", "num_sms", "reason"),
    [
        ("product", "float32", 1.0, None, "allowed are sum, avg, max, min, premul_sum"),
        ("sum", "complex64", 1.0, None, "allowed are bfloat16"),
        ("avg", "int32", 1.0, None, "would have to be rounded"),
        ("sum", "float32", 2.0, None, "use op='premul_sum'"),
        ("sum", "float32", 1.0, 0, "give 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(op: Any, dtype: str, factor: float, num_sms: int | None, reason: str) -> None:
    with pytest.raises(Misconfigured, match=reason):
        Reduction(op=op, dtype=dtype, factor=factor, num_sms=num_sms)


def test_sums_are_kept_as_sent_or_as_added_up() -> None:
    """bfloat16 is added up in float32: another dtype would have to be rounded to."""
    assert Reduction(op="sum", dtype="bfloat16", result="float32").result_dtype == "float32"
    with pytest.raises(Misconfigured, match="bfloat16 into float64: allowed are bfloat16 or float32"):
        Reduction(op="sum", dtype="bfloat16", result="float64")


def launched(num_bytes: int, *, dtype: str = "bfloat16", num_sms: int | None = None, skew: int = 0) -> Any:
    call = ReduceLaunch(((1 << 30) + skew, 1 << 31, (1 << 31) + num_bytes), 1 << 32, num_bytes, 1)
    return launch_of(call, Reduction(op="sum", dtype=dtype, num_sms=num_sms), device_sms=132)


def test_no_more_programs_than_sms_were_given() -> None:
    """With `num_sms` the kernel is as many blocks, however long the data; without, 3 for each SM, in one wave."""
    assert (launched(1 << 28, num_sms=16).num_programs, launched(1 << 28).num_programs) == (16, 3 * 132)
    assert launched(64, num_sms=16).num_programs == launched(64).num_programs == 1


def test_length_does_not_compile_again() -> None:
    assert launched(1 << 20).constants == launched(1 << 24).constants


def test_a_cut_element_is_refused() -> None:
    with pytest.raises(Misconfigured, match="cuts an element"):
        launched(64, skew=1)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "premul_sum"])
def test_reference_is_what_the_op_says(op: ReductionOp) -> None:
    """Each op on numbers that float32 holds exactly, by numpy."""
    rows = np.array([[1.0, -2.0, 8.0], [3.0, 4.0, -0.5], [2.0, 4.0, 1.5]])
    wanted = {"sum": rows.sum(0), "avg": rows.mean(0), "max": rows.max(0), "min": rows.min(0)}
    wanted["premul_sum"] = 2 * wanted["sum"]
    how = Reduction(op=op, dtype="float32", factor=2.0 if op == "premul_sum" else 1.0)
    got = reference([torch.tensor(row, dtype=torch.float32) for row in rows], how)
    assert np.allclose(got.numpy(), wanted[op], rtol=1e-7)
