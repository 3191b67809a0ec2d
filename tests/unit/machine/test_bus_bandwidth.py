"""Bus bandwidth is nccl-tests' for every operation."""

import pytest

from counterpoint.machine.bus_bandwidth import bus_factor, bus_gb_per_s


@pytest.mark.parametrize(
    ("operations", "of_one", "of_two", "of_eight"),
    [
        (("all_reduce",), 0.0, 1.0, 1.75),
        (("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.0, 0.5, 0.875),
        (("broadcast", "reduce", "send_recv"), 1.0, 1.0, 1.0),
    ],
)
def test_the_factor_is_that_of_nccl_tests(
    operations: tuple[str, ...], of_one: float, of_two: float, of_eight: float
) -> None:
    """As `getBw` of each of its tests computes it, for one rank too."""
    for operation in operations:
        assert [bus_factor(operation, ranks) for ranks in (1, 2, 8)] == [of_one, of_two, of_eight], operation


def test_the_size_is_that_of_the_full_array() -> None:
    """100 MB in 1 ms over 8 ranks."""
    assert bus_gb_per_s("all_reduce", 100_000_000, 8, 1000.0) == pytest.approx(175.0)
