"""A wait on the host that ends: with what it waits for, or with the reason why that will not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from counterpoint.collectives.watchdog import Doing, Watchdog

__all__ = ["Patience"]

_SPINS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 30, 20e-6, 1e-3, 0.05


class Patience:
    """Waits for ranks that a watchdog looks at.

    Args:
        watchdog: of the same ranks.
        failure: why this rank has given up; None while it has not.
    """

    def __init__(self, watchdog: Watchdog, failure: Callable[[], BaseException | None]) -> None:
        self.watchdog, self._failure = watchdog, failure

    def until(self, there: Callable[[], bool], doing: Doing, waiting_for: int | None) -> None:
        """Returns as soon as `there()`: looks often at first, then every millisecond, and asks why from time to time.

        Raises:
            PeerTimeout, Misconfigured: it will not come, or this rank has given up.
        """
        for _ in range(_SPINS):
            if there():
                return
            time.sleep(0)
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        next_look = started + _LOOK_S
        while not there():
            failure = self._failure()
            if failure is not None:
                raise failure
            now = time.monotonic()
            if waiting_for is not None and now >= next_look:
                error = self.watchdog.look(doing, waiting_for, now - started)
                if error is not None and not there():  # a rank may end right after it has signalled
                    raise error
                next_look = now + _LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
