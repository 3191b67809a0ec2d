"""How many SMs a GEMM leaves to the sums beside it, on cases that can be counted by hand."""

import msgspec
import pytest

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from counterpoint.pair.choice import GemmSms, choose_gemm_sms
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import Pair, Product, reduced_us

SQUARE = (8192, 8192, 8192)  # 2048 tiles: 16 waves on 132 SMs and on 128, 17 on 124
H200 = default_profile()
CALM = msgspec.structs.replace(H200, sums=msgspec.structs.replace(H200.sums, contention=0.0))


def pair(
    collective: str, *products: Product, size_bytes: int = 1 << 28, compute_us: float = 1600.0, comm_us: float = 800.0,
    world_size: int = 4,
) -> Pair:  # fmt: skip
    return Pair(
        products=products, compute_us=compute_us, collective=collective, size_bytes=size_bytes, comm_us=comm_us,
        mechanism="zero_sm", num_ctas=0, world_size=world_size, layout=SmLayout.even(132),
    )  # fmt: skip


def chosen(ratio: float, collective: str = "all_reduce", products: int = 1) -> GemmSms:
    """Beside a GEMM of 1.4 ms on 132 SMs, the collective `ratio` times as long, at 380 GB/s of bus bandwidth."""
    comm_us = ratio * 1400.0 * products
    moved = comm_us * 380e3  # bus bytes of 4 ranks: 3/4 of the array, twice for all_reduce
    size = round(moved / (1.5 if collective == "all_reduce" else 0.75))
    gemms = [SQUARE] * products
    both = pair(collective, *gemms, size_bytes=size, compute_us=1400.0 * products, comm_us=comm_us)
    return choose_gemm_sms(both, H200)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_sms_that_cost_no_wave_are_left(collective: str) -> None:
    """128 SMs need the 16 waves that 132 need, so the four are free."""
    assert chosen(0.25, collective).gemm_sms == 128


def test_a_long_collective_gets_more_sms_where_it_pays() -> None:
    """As long as the GEMM, 4 SMs add too slowly."""
    found = chosen(1.0).gemm_sms
    assert found is not None
    assert found < 128
    # A reduce_scatter twice as long as the GEMM adds up most of it when the GEMM has long ended
    assert chosen(2.0, "reduce_scatter").gemm_sms is None


def test_without_products_there_is_nothing_to_limit() -> None:
    found = choose_gemm_sms(pair("all_reduce"), H200)
    assert (found.gemm_sms, list(found.together_us)) == (None, [132])


def predicted(collective: str, gemm_sms: int, *, size_bytes: int = 1 << 28, comm_us: float = 800.0) -> float:
    return reduced_us(pair(collective, SQUARE, size_bytes=size_bytes, comm_us=comm_us), gemm_sms, CALM)


def test_sums_without_an_sm_follow_the_gemm_which_takes_its_waves_on_fewer() -> None:
    """1600 µs of GEMM, then (4 + 1) / 4 of 256 MiB at 3.8 TB/s."""
    assert predicted("reduce_scatter", 132) == pytest.approx(1600.0 + 1.25 * 2**28 / 3.8e6)
    # the gather of 400 µs begins with the first chunk's sum, when the GEMM has ended
    assert predicted("all_reduce", 132) == pytest.approx(1600.0 + 400.0 + 7 / 8 * 1.25 * 2**28 / 3.8e6, rel=1e-3)
    # 17 instead of 16 on 124
    assert predicted("reduce_scatter", 124, size_bytes=1 << 20, comm_us=10.0) == pytest.approx(1700.0)


def test_a_sum_beside_the_gemm_has_the_rate_of_its_sms() -> None:
    """8 SMs of 105 GB/s; the GEMM is shorter than that takes, and the rest goes at full speed."""
    moved, ends = 1.25 * 2**28, 1700.0
    started = 7 / 8 * 800.0
    beside = (ends - started) * 8 * 105e3
    assert beside > moved  # all of it fits beside this GEMM
    assert predicted("reduce_scatter", 124) == pytest.approx(max(ends, started + moved / (8 * 105e3)))


def test_a_gemm_that_lets_others_in_between_waits_for_their_sum() -> None:
    """Two products: the sum runs between them, so the second ends later by its time."""
    alone = reduced_us(pair("reduce_scatter", SQUARE, SQUARE, compute_us=3200.0), 132, CALM)
    assert alone == pytest.approx(3200.0 + 1.25 * 2**28 / 3.8e6)


@pytest.mark.parametrize(
    ("collective", "size", "world_size"), [("all_gather", 1024, 4), ("all_reduce", 0, 4), ("all_reduce", 1024, 1)]
)
def test_what_makes_no_sense_is_refused(collective: str, size: int, world_size: int) -> None:
    with pytest.raises(Misconfigured):
        choose_gemm_sms(pair(collective, SQUARE, size_bytes=size, world_size=world_size), H200)
