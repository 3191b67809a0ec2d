"""Why a kernel is slower beside communication, told apart by grid, CTAs and kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.records.diagnosis import KernelComparison
from counterpoint.trace.timeline import Kind
from tests.support.job_builder import Op, comm, job, op, rank

PEER = {"name": "Memcpy PtoP (Device -> Device)", "info": None, "bytes": 1 << 20}


def kernel(
    *, beside_us: float, name: str = "nvjet", blocks: int = 132, ctas: int = 24, copies: bool = False
) -> KernelComparison:
    """A kernel of 100 µs alone, four times, and four times beside communication of its own length."""
    ops: list[Op] = []
    for i in range(4):
        ops.append(op(name, 1000.0 * i, 1000.0 * i + 100 + i, grid=(blocks, 1, 1)))
        at = 1000.0 * i + 500
        ops.append(op(name, at, at + beside_us + i, grid=(blocks, 1, 1)))
        if copies:
            ops.append(Op(name="Memcpy PtoP (Device -> Device)", start=at - 5, end=at + 400, kind=Kind.COMM, stream=24,
                          grid=(0, 0, 0), bytes=1 << 20))  # fmt: skip
        else:
            ops.append(comm("all_gather", at - 5, at + 400, ctas=ctas))
    j = job(rank(*ops))
    return next(k for k in Analysis(j).kernels.kernels if k.name == name)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        pytest.param({"beside_us": 150.0}, "tail_effect", id="1-wave-to-2"),
        pytest.param({"beside_us": 150.0, "blocks": 264}, "tail_effect", id="2-waves-to-3"),
        pytest.param({"beside_us": 115.0, "blocks": 132 * 40}, "sm_contention", id="40-waves-to-49"),
        pytest.param({"beside_us": 115.0, "blocks": 100}, "sm_contention", id="fits-beside-24-CTAs"),
        pytest.param({"beside_us": 115.0, "copies": True}, "bandwidth", id="copy-engines-take-no-SM"),
        pytest.param({"beside_us": 115.0, "name": "void vectorized_elementwise_kernel<4>"}, "bandwidth", id="memory"),
        pytest.param({"beside_us": 103.0}, "none", id="3-per-cent"),
        pytest.param({"beside_us": 90.0}, "none", id="faster"),
        pytest.param({"beside_us": 460.0}, "none", id="2-waves-for-1-cannot-make-4.6-x"),
        pytest.param({"beside_us": 200.0, "blocks": 100}, "none", id="24-of-132-SMs-cannot-make-2-x"),
        pytest.param({"beside_us": 150.0, "blocks": 100, "ctas": 2}, "none", id="2-of-132-SMs-cannot-make-1.5-x"),
        pytest.param({"beside_us": 240.0}, "tail_effect", id="2-waves-for-1-and-some-power"),
        pytest.param({"beside_us": 300.0, "copies": True}, "bandwidth", id="short-kernels-lose-that-much-to-copies"),
    ],
)
def test_cause(facts: dict[str, object], cause: str) -> None:
    """Tail effect, SM contention, bandwidth, or nothing."""
    assert kernel(**facts).cause == cause  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("alone_count", 4),
        ("overlapped_count", 4),
        ("alone_us", 101.5),
        ("overlapped_us", 151.5),
        ("slowdown", 151.5 / 101.5),
        ("waves_alone", 1),
        ("waves_overlapped", 2),
        ("comm_ctas", 24),
        ("comm_ctas_without_extra_wave", 12),
        ("cost_us", 4 * 50.0),
    ],
)
def test_numbers(key: str, expected: float) -> None:
    """120 blocks on 132 SMs, 24 of which communication takes: 12 CTAs would fit."""
    assert getattr(kernel(beside_us=150.0, blocks=120), key) == pytest.approx(expected)


def test_sizes_of_one_kernel_without_shapes_are_told_apart() -> None:
    """A GEMM kernel of 100 µs and of 600 µs, the longer one beside communication in half the steps: 1.5 x, not 9 x."""
    ops: list[Op] = []
    for step in range(4):
        at, beside = 2000.0 * step, step >= 2
        ops.append(op("nvjet", at + 50, at + 150 + step, grid=(132, 1, 1)))
        ops.append(op("nvjet", at + 500, at + 500 + (900 if beside else 600) + step, grid=(132, 1, 1)))
        if beside:
            ops.append(comm("all_gather", at + 490, at + 1450))
    j = job(rank(*ops, steps=[(2000.0 * step, 2000.0 * step + 1900) for step in range(4)]))
    kernels = [k for k in Analysis(j).kernels.kernels if k.name == "nvjet"]
    assert [(k.alone_count, k.overlapped_count, k.slowdown) for k in kernels] == [
        (2, 2, pytest.approx(902.5 / 600.5)),
        (4, 0, None),
    ]


def test_a_slow_down_that_its_cause_cannot_produce_is_unknown_and_costs_nothing() -> None:
    """Two sizes of one kernel are mixed: neither a slow-down nor a time without contention is known."""
    mixed = kernel(beside_us=460.0)
    assert mixed.slowdown is None
    assert mixed.cost_us == 0.0


@settings(max_examples=60, deadline=None)
@given(beside_us=st.floats(50.0, 480.0), blocks=st.integers(1, 2000), ctas=st.integers(1, 64), copies=st.booleans())
def test_no_slow_down_is_explained_by_what_cannot_produce_it(
    beside_us: float, blocks: int, ctas: int, copies: bool
) -> None:
    """Whatever the grid: what is told is within reach of its cause, and what is not costs nothing."""
    found = kernel(beside_us=beside_us, blocks=blocks, ctas=ctas, copies=copies)
    taken = 0 if copies else ctas
    assert found.waves_alone is not None
    assert found.waves_overlapped is not None
    more_waves = found.waves_overlapped / found.waves_alone
    measured = (beside_us + 1.5) / 101.5
    if found.cause == "tail_effect":
        assert measured <= 1.26 * more_waves
    elif found.cause == "sm_contention":
        assert measured <= 1.26 * max(132 / (132 - taken), more_waves)
    elif found.cause == "none":
        assert found.cost_us == 0.0
        assert found.slowdown is None or found.slowdown < 1.06
    assert found.slowdown is None or found.slowdown == pytest.approx(measured)
