"""How the benchmark counts."""

from fsdp_step import COLUMNS, cells, summary

LOOKS = {"stock": {"peak_gb": 40.0, "loss": 2.5, "norm": 1.25}, "overlap": {"peak_gb": 42.0, "loss": 2.5, "norm": 1.25}}
TIMES = {"stock": (100.0, 9.0), "stock, prefetch 2": (90.0, 8.0), "overlap": (75.0, 7.0), "bound": (70.0, 5.0)}


def test_what_is_won_counts_from_the_best_stock() -> None:
    """15 of 20 ms between the best stock and the bound; plain stock is behind that."""
    won = {row["variant"]: row["won"] for row in summary(2048, TIMES, LOOKS)}
    assert won == {"stock": -0.5, "stock, prefetch 2": 0.0, "overlap": 0.75, "bound": 1.0}


def test_nothing_can_be_won_where_nothing_is_exposed() -> None:
    """A bound that is no faster than stock gives no part, rather than a part of noise."""
    assert {row["won"] for row in summary(2048, TIMES | {"bound": (91.0, 5.0)}, LOOKS)} == {None}


def test_memory_stands_beside_plain_stock() -> None:
    """Printed in the columns' order, with what was not looked at left empty."""
    rows = [cells(row) for row in summary(2048, TIMES, LOOKS)]
    assert [len(row) for row in rows] == [len(COLUMNS)] * 4
    assert rows[2] == ["2048", "overlap", "75.0", "1.200", "75%", "7.0", "42.00", "1.050", "2.500000", "1.2500"]
    assert rows[3][6:] == ["", "", "", ""]
