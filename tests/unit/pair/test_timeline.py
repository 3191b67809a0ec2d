"""One pair, wave by wave."""

from __future__ import annotations

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


@pytest.mark.parametrize(("comm_us", "end"), [(30.0, 130.0), (100.0, 200.0), (500.0, 500.0)])
def test_a_full_grid_needs_a_second_wave(comm_us: float, end: float) -> None:
    """132 blocks on 108 SMs: the last 24 start when the collective ends, or after the first wave."""
    assert play([ONE_WAVE], comm_us, compute_at_us=0.0, comm_at_us=0.0, comm_first=True, shares=BLOCKED) == end


def test_a_resident_gemm_holds_the_collective_back() -> None:
    """Without free SMs it starts at the end of the GEMM: T = T_g + T_c."""
    assert play([ONE_WAVE], 60.0, compute_at_us=0.0, comm_at_us=10.0, comm_first=False, shares=BLOCKED) == 160.0


def test_a_last_wave_with_room_lets_nobody_in() -> None:
    """Beside a second wave of 44 tiles on 132 SMs 24 CTAs wait, too: T = T_g + T_c."""
    gemm = GemmKernel(tiles=132 + 44, num_sms=132, time_us=100.0)
    assert play([gemm], 60.0, compute_at_us=0.0, comm_at_us=10.0, comm_first=False, shares=BLOCKED) == 160.0


def test_a_collective_slips_in_between_two_kernels() -> None:
    """Held back by the first of two kernels only, it runs beside the second, which then needs another wave."""
    end = play([ONE_WAVE] * 2, 60.0, compute_at_us=0.0, comm_at_us=10.0, comm_first=False, shares=BLOCKED)
    assert end == 100.0 + 60.0 + 100.0


@pytest.mark.parametrize("comm_first", [True, False])
def test_with_sms_of_its_own_the_order_does_not_matter(comm_first: bool) -> None:
    """Both start at once and the longer one decides."""
    assert play([ONE_WAVE], 60.0, compute_at_us=0.0, comm_at_us=0.0, comm_first=comm_first, shares=BESIDE) == 100.0


def test_contention_lasts_as_long_as_both_run() -> None:
    """Twice as slow while the 30 µs collective runs (60 µs, itself slowed): 100 µs become 130."""
    shares = SmShares(waiting_ctas=0, sms_beside=108, compute_slowdown=2.0, comm_slowdown=2.0)
    assert play([ONE_WAVE], 30.0, compute_at_us=0.0, comm_at_us=0.0, comm_first=True, shares=shares) == 130.0


def test_a_collective_that_ended_before_disturbs_nobody() -> None:
    """20 µs of collective, the GEMM 50 µs later: T = 50 + T_g."""
    assert play([ONE_WAVE], 20.0, compute_at_us=50.0, comm_at_us=0.0, comm_first=True, shares=BLOCKED) == 150.0
