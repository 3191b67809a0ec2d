"""One pair, wave by wave."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.pair.together import GemmKernel, SmShares, finish_us, play

BLOCKED = SmShares(waiting_ctas=24, sms_beside=108)
BESIDE = SmShares(waiting_ctas=0, sms_beside=108)
ONE_WAVE = GemmKernel(tiles=132, num_sms=132, time_us=100.0)


@given(
    tiles=st.integers(1, 600), tile_us=st.integers(1, 50),
    sms=st.integers(1, 132), late_sms=st.integers(0, 64), late_us=st.integers(0, 500),
)  # fmt: skip
def test_the_last_tile_is_found_without_playing_each(
    tiles: int, tile_us: int, sms: int, late_sms: int, late_us: int
) -> None:
    """The closed form agrees with handing out tile after tile to whichever SM is free."""
    free = [0] * sms + [late_us] * late_sms
    heapq.heapify(free)
    last = 0
    for _ in range(tiles):
        last = max(last, free[0] + tile_us)
        heapq.heapreplace(free, free[0] + tile_us)
    assert finish_us(tiles, tile_us, sms=sms, late_sms=late_sms, late_us=late_us) == last


TWO_WAVES = GemmKernel(tiles=132 + 44, num_sms=132, time_us=100.0)
SLOWED = SmShares(waiting_ctas=0, sms_beside=108, compute_slowdown=2.0, comm_slowdown=2.0)


@pytest.mark.parametrize(
    ("kernels", "shares", "comm_us", "compute_at_us", "comm_at_us", "end"),
    [
        # 132 blocks on 108 SMs: the last 24 start when the collective ends, or after the first wave
        ([ONE_WAVE], BLOCKED, 30.0, 0.0, 0.0, 130.0),
        ([ONE_WAVE], BLOCKED, 100.0, 0.0, 0.0, 200.0),
        ([ONE_WAVE], BLOCKED, 500.0, 0.0, 0.0, 500.0),
        # the GEMM first: without free SMs the collective starts at its end, also beside a last wave of 44 tiles
        ([ONE_WAVE], BLOCKED, 60.0, 0.0, 10.0, 160.0),
        ([TWO_WAVES], BLOCKED, 60.0, 0.0, 10.0, 160.0),
        # held back by the first of two kernels only, it runs beside the second, which then needs another wave
        ([ONE_WAVE] * 2, BLOCKED, 60.0, 0.0, 10.0, 100.0 + 60.0 + 100.0),
        # with SMs of its own it starts at once, and the longer one decides
        ([ONE_WAVE], BESIDE, 60.0, 0.0, 0.0, 100.0),
        # twice as slow while the collective of 30 µs runs (60 µs, itself slowed)
        ([ONE_WAVE], SLOWED, 30.0, 0.0, 0.0, 130.0),
        # it ended before the GEMM came
        ([ONE_WAVE], BLOCKED, 20.0, 50.0, 0.0, 150.0),
    ],
)  # fmt: skip
def test_a_pair_ends_when_its_waves_do(
    kernels: list[GemmKernel], shares: SmShares, comm_us: float, compute_at_us: float, comm_at_us: float, end: float
) -> None:
    first = comm_at_us <= compute_at_us
    for comm_first in (True, False) if shares is BESIDE else (first,):
        times = {"compute_at_us": compute_at_us, "comm_at_us": comm_at_us}
        assert play(kernels, comm_us, **times, comm_first=comm_first, shares=shares) == end
