"""What lies between measured points."""

import pytest
from budget_rule import gemm_curve, products_of
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.pair.curves import CommCurve, CommPoint, Curves, GemmCurve, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.records.measurement import BlockRow, Timing

H200 = SmLayout.even(132)
GEMM = "gemm 4096x4096x4096"  # 512 tiles of 128 x 256


def timing(us: float) -> Timing:
    return Timing(us=us, p10_us=us, p90_us=us, rank=0, per_rank_us=(us,))


def affine(latency_us: float, gb_per_s: float, num_ctas: int) -> CommCurve:
    sizes = (1 << 20, 1 << 24, 1 << 28)
    times = [latency_us + size / gb_per_s / 1e3 for size in sizes]
    points = [CommPoint(size_bytes=size, time_us=us, num_ctas=num_ctas) for size, us in zip(sizes, times, strict=True)]
    return CommCurve(points=tuple(points))


def curves(*limits: int | None) -> Curves:
    """An all_gather whose rate is 10 GB/s per CTA."""
    comms = {("all_gather", limit, None): affine(0.0, 10.0 * (limit or 24), limit or 24) for limit in limits}
    return Curves(layout=H200, gemms={}, comms=comms)  # type: ignore[arg-type]


STEPPED = ((108, 250.0), (132, 200.0))


@pytest.mark.parametrize(
    ("points", "num_sms", "expected"),
    [
        # 512 tiles take 4 waves from 128 SMs on and 5 below, down to 103: time steps there and nowhere else
        *((STEPPED, num_sms, 200.0) for num_sms in (132, 130, 128)),
        *((STEPPED, num_sms, 250.0) for num_sms in (126, 108)),
        (((128, 210.0), (132, 200.0)), 130, 205.0),  # equal waves (power, clocks) are joined by a line
        (((132, 200.0),), 132, 200.0),
    ],
)
def test_a_gemm_follows_its_waves(points: tuple[tuple[int, float], ...], num_sms: int, expected: float) -> None:
    assert gemm_curve(GEMM, points).time_us(num_sms) == pytest.approx(expected)


@pytest.mark.parametrize("num_sms", [100, 133])
def test_a_gemm_is_not_extrapolated(num_sms: int) -> None:
    """Beyond the measured SM counts there is an error that lists them."""
    with pytest.raises(Misconfigured, match="measured at: 108, 132"):
        gemm_curve(GEMM, ((108, 250.0), (132, 200.0))).time_us(num_sms)


def test_a_kernel_takes_no_more_sms_than_tiles_and_waves_of_attention_are_not_guessed() -> None:
    """64 tiles leave half of the GPU to the collective."""
    (kernel,) = gemm_curve("gemm 1024x2048x512", ((132, 10.0),)).kernels(132)
    assert (kernel.tiles, kernel.num_sms) == (64, 64)
    with pytest.raises(Unsupported, match="GEMMs only"):
        GemmCurve(workload="attention 4x32x4096x128", products=(), points=((108, 2.0), (132, 1.0)))


@given(size=st.integers(1 << 19, 1 << 29), latency=st.floats(5, 100), rate=st.floats(10, 500))
def test_latency_and_bandwidth_are_met_exactly(size: int, latency: float, rate: float) -> None:
    """A collective of time latency + bytes / bandwidth is told exactly at any size within reach."""
    assert affine(latency, rate, 24).at(size).time_us == pytest.approx(latency + size / rate / 1e3)


@pytest.mark.parametrize("size", [(1 << 19) - 1, (1 << 29) + 1])
def test_sizes_far_outside_are_refused(size: int) -> None:
    with pytest.raises(Misconfigured, match="too far from the measured sizes"):
        affine(10.0, 300.0, 24).at(size)


def test_small_arrays_take_the_ctas_that_were_seen() -> None:
    """NCCL takes fewer CTAs for small arrays; between two sizes the larger one's count is assumed."""
    small = CommPoint(size_bytes=1000, time_us=5.0, num_ctas=8)
    curve = CommCurve(points=(small, CommPoint(size_bytes=2000, time_us=6.0, num_ctas=24)))
    assert [curve.at(size).num_ctas for size in (1000, 1001, 2000)] == [8, 24, 24]


def test_rates_are_linear_in_ctas() -> None:
    """12 CTAs, between 8 and 16, move 120 GB/s if each moves 10."""
    assert curves(8, 16).comm("all_gather", 1 << 24, SmSplit(max_ctas=12)).time_us == pytest.approx((1 << 24) / 120e3)


@pytest.mark.parametrize(
    ("operation", "split", "said"),
    [
        # between 8 and 16 CTAs in NCCL's own clusters lies nothing about clusters of 2
        ("all_gather", SmSplit(max_ctas=12, cga_cluster=2), "12 CTAs in clusters of 2, but at: none"),
        *(("all_gather", SmSplit(max_ctas=limit), "but at: 8, 16") for limit in (4, 32, None)),
    ],
)
def test_ctas_are_not_extrapolated(operation: str, split: SmSplit, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        curves(8, 16).comm(operation, 1 << 24, split)


def test_the_fastest_limit_is_t_c() -> None:
    """T_c is the best of the measured limits; what was not measured is named."""
    assert curves(None, 4).fastest_us("all_gather", 1 << 24) == pytest.approx((1 << 24) / 240e3)
    with pytest.raises(Misconfigured, match="'all_to_all'; measure it alone"):
        curves(None).fastest_us("all_to_all", 1 << 24)


def test_blocks_become_curves_without_marked_rows() -> None:
    """Rows that must not be believed, and those of other mechanisms, leave no point."""
    rows = [
        BlockRow(what=GEMM, mechanism="stock", time=timing(200.0)),
        BlockRow(what=GEMM, mechanism="gemm_sms=108", num_sms=108, time=timing(250.0)),
        BlockRow(what=GEMM, mechanism="gemm_sms=100", time=timing(1.0), marked="no effect"),
        BlockRow(what=GEMM, mechanism="green=64", time=timing(1.0)),
        BlockRow(what="all_gather", mechanism="nccl", size_bytes=1000, num_ctas=24, time=timing(5.0)),
        BlockRow(what="all_gather", mechanism="nccl_zero_cta", size_bytes=1000, num_ctas=0, time=timing(1.0)),
    ]
    made = curves_from(rows, products_of(rows), layout=H200)
    assert (made.gemms[GEMM].points, list(made.comms)) == (((108, 250.0), (132, 200.0)), [("all_gather", None, None)])


def test_a_curve_that_ends_early_does_not_stop_the_others() -> None:
    """Small sizes of a limit that did nothing there are marked and missing; other limits know them."""
    known = curves(None, 8)
    short = CommCurve(points=known.comms["all_gather", 8, None].points[1:])
    cut = Curves(layout=H200, gemms={}, comms={**known.comms, ("all_gather", 8, None): short})
    assert cut.fastest_us("all_gather", 1 << 20) == known.comms["all_gather", None, None].points[0].time_us


@pytest.mark.parametrize(
    ("size", "us", "ctas", "said"),
    [
        # a damaged measurement is told by name, and divides nothing by zero later
        *((size, us, 24, "all_gather by nccl: .* cannot be; measure it again")
          for size, us in ((1 << 20, 0.0), (1 << 20, -1.0), (0, 5.0))),
        (1000, 5.0, None, "give default_ctas"),  # where nobody looked at plain NCCL, its CTAs are not made up
    ],
)  # fmt: skip
def test_rows_that_make_no_point_are_refused(size: int, us: float, ctas: int | None, said: str) -> None:
    row = BlockRow(what="all_gather", mechanism="nccl", size_bytes=size, num_ctas=ctas, time=timing(us))
    with pytest.raises(Misconfigured, match=said):
        curves_from([row], products_of([row]), layout=H200)
