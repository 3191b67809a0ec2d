"""A collective on a GPU that was started and may not have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.cuda_moments import Moment
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
        doing: the call.
        transport: that runs it.
        end: when it has ended.
        keep: tensors that have to live until then.
    """

    def __init__(self, doing: Doing, transport: CudaTransport, end: Moment, keep: tuple[Any, ...]) -> None:
        self._doing, self._transport, self._end, self.keep = doing, transport, end, keep

    def wait(self, timeout_s: float | None = None) -> bool:
        """The current stream waits; the host does not, unless there is a `timeout_s`.

        Args:
            timeout_s: seconds that the host waits for the end.

        Raises:
            PeerTimeout: a rank died or did not come, as far as is known now; or `timeout_s` has passed.
            Misconfigured: another rank made another call.
        """
        transport, end = self._transport, self._end
        transport.check()
        if timeout_s is not None and not end.capture:
            deadline = time.monotonic() + timeout_s
            while not transport.moments.passed(end):
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"{self._doing} has not ended within {timeout_s:g} s; wait again, or longer")
                time.sleep(_PAUSE_S)
            transport.check()
        stream = transport.gpu.current_stream()
        if stream != end.stream:
            transport.moments.wait(stream, end)
        self.keep = ()  # whatever uses their memory next on this stream comes after the end
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; never of one that was captured."""
        return not self._end.capture and self._transport.moments.passed(self._end)

    def exception(self) -> BaseException | None:
        """Why the communicator failed; None if it did not."""
        return self._transport.failure
