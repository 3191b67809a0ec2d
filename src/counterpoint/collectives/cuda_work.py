"""A collective on a GPU that was started and may not have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.announce import Notice
from counterpoint.collectives.board import Board
from counterpoint.collectives.cuda_moments import Moment
from counterpoint.collectives.lower import DriverCall
from counterpoint.collectives.watchdog import Doing
from counterpoint.collectives.work import Work
from counterpoint.errors import PeerTimeout

if TYPE_CHECKING:
    from counterpoint.collectives.cuda_transport import CudaTransport

__all__ = ["CudaWork"]

_PAUSE_S = 1e-4


class CudaWork(Work):
    """Ends with a moment of a stream. If it was captured, it is for the capture alone: `wait` joins it.

    Args:
        transport: that runs it.
        notice: what it was announced as.
        number: of the call on its line.
        record: on the board.
        calls: of the driver.
        began: its stream has come to it when this has passed, and all calls before it on its channel have ended.
        ended: when it has ended.
        keep: tensors that have to live until then.
    """

    def __init__(
        self,
        transport: CudaTransport,
        notice: Notice,
        number: int,
        record: Board,
        calls: tuple[DriverCall, ...],
        began: Moment,
        ended: Moment,
        keep: tuple[Any, ...],
    ) -> None:
        self._transport, self._notice, self.number, self.record, self.calls = transport, notice, number, record, calls
        self.began, self.ended, self.keep = began, ended, keep
        self.begun_s: float | None = None  # since when it has been seen to have begun

    @property
    def doing(self) -> Doing:
        """The call."""
        return self._notice.doing(self.number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """The current stream waits; the host does not, unless there is a `timeout_s`.

        Args:
            timeout_s: seconds that the host waits for the end.

        Raises:
            PeerTimeout: a rank died or did not come, as far as is known now; or `timeout_s` has passed.
            Misconfigured: another rank made another call.
        """
        transport, ended = self._transport, self.ended
        transport.check()
        if timeout_s is not None and not ended.capture:
            deadline = time.monotonic() + timeout_s
            while not transport.moments.passed(ended):
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"{self.doing} has not ended within {timeout_s:g} s; wait again, or longer")
                time.sleep(_PAUSE_S)
            transport.check()
        stream = transport.gpu.current_stream()
        if stream != ended.stream:
            transport.moments.wait(stream, ended)
        self.keep = ()  # whatever uses their memory next on this stream comes after the end
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; never of one that was captured."""
        return not self.ended.capture and self._transport.moments.passed(self.ended)

    def exception(self) -> BaseException | None:
        """Why the communicator failed; None if it did not."""
        return self._transport.failure
