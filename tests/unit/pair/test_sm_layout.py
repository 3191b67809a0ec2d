"""Which SMs clusters take, and what is left."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.pair.sm_split import SmLayout

H200 = SmLayout.even(132)


def test_an_h200_has_six_gpcs_of_16_and_two_of_18() -> None:
    """132 SMs in whole TPCs, no GPC larger than 18."""
    assert sorted(H200.gpc_sms) == [16] * 6 + [18] * 2


@pytest.mark.parametrize(
    ("ask", "number", "said"),
    [
        *((SmLayout.even, num_sms, "even number") for num_sms in (0, 1, 131)),  # SMs come in pairs
        *((H200.gemm_sms_beside, num_ctas, "leave a GEMM no SM") for num_ctas in (131, 132, 133)),
    ],
)
def test_numbers_that_cannot_be_are_refused(ask: Callable[[int], object], number: int, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        ask(number)


@pytest.mark.parametrize(
    ("num_ctas", "comm_cluster", "left"),
    [(24, 4, 108), (16, 4, 116), (8, 4, 124), (4, 4, 128), (1, 4, 130), (24, 1, 100)],
)
def test_a_gemm_loses_an_sm_where_a_pair_is_broken(num_ctas: int, comm_cluster: int, left: int) -> None:
    """Clusters of 2 cannot use the odd SM of a GPC: one CTA costs two SMs."""
    assert H200.gemm_sms_beside(num_ctas, comm_cluster=comm_cluster) == left


@pytest.mark.parametrize(
    ("gemm_sms", "num_ctas", "comm_cluster", "waiting"),
    [(124, 8, 4, 0), (116, 16, 4, 8), (108, 24, 4, 16), (116, 16, 2, 0), (108, 24, 2, 0), (132, 24, 4, 24)],
)
def test_clusters_of_four_find_less_room_than_clusters_of_two(
    gemm_sms: int, num_ctas: int, comm_cluster: int, waiting: int
) -> None:
    """As on 4 x H200 (2026-11-21): clusters of 4 start beside 124 SMs; beside 116 or 108 only those of 2 do."""
    assert H200.waiting_ctas(gemm_sms=gemm_sms, num_ctas=num_ctas, comm_cluster=comm_cluster) == waiting


@given(gemm_sms=st.integers(1, 66).map(lambda n: 2 * n), num_ctas=st.integers(1, 32))
def test_single_blocks_fit_wherever_there_is_room(gemm_sms: int, num_ctas: int) -> None:
    fits = H200.waiting_ctas(gemm_sms=gemm_sms, num_ctas=num_ctas) == 0
    assert fits == (gemm_sms + num_ctas <= H200.num_sms)
