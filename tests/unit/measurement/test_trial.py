"""Cases of a trial, and how long the device is held back."""

import pytest

from counterpoint.measurement.trial import DELAYED, Case, sides_of, spin_us


@pytest.mark.parametrize(
    ("what", "sides", "late"),
    [
        ("compute_alone", ("compute",), None),
        ("comm_alone", ("comm",), None),
        ("serial", ("compute", "comm"), None),
        ("together", ("comm", "compute"), None),
        ("comm_first", ("comm", "compute"), "compute"),
        ("compute_first", ("comm", "compute"), "comm"),
    ],
)
def test_the_delay_makes_the_order(what: Case, sides: tuple[str, ...], late: str | None) -> None:
    """The host queues the collective first; the side that must be second waits."""
    assert (sides_of(what), DELAYED.get(what)) == (sides, late)


def test_computation_is_queued_before_a_collective_in_which_the_host_waits() -> None:
    """After it, it would be queued too late; one after the other they stay in their order."""
    assert sides_of("together", host_waits=True) == ("compute", "comm")
    assert sides_of("serial", host_waits=True) == sides_of("serial")


def test_the_spin_outlasts_the_host() -> None:
    """Half as long again as the last trials took to queue."""
    assert all(spin_us(host_us) > 1.4 * host_us for host_us in (50.0, 500.0, 5000.0))


def test_one_hiccup_does_not_hold_up_everything() -> None:
    """A second on the host does not become a second of spinning for every trial after it."""
    assert spin_us(1e6) == 20_000.0
