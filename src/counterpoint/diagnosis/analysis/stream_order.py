"""Find GPU work that was ready, but began only after work of another stream that was launched before it.

With `CUDA_DEVICE_MAX_CONNECTIONS=1` all streams share one queue: work begins in the order of its launches, whatever its
stream. A stream of its own would have begun the work earlier. Work that depends on the other stream begins after the
end of what it waits for; so only work that began while the earlier work still ran is evidence, and work that began
before the earlier work shows that there are several queues. Evidence needs compute and communication: collectives of
two streams may begin together since both waited for one kernel.
"""

from __future__ import annotations

import numpy as np

from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.trace.timeline import F64, ROUNDED_US, Kind, device_of, previous_on_stream

_READY_US = 20.0  # work that was ready for so long before the other work began could have begun
_TOGETHER_US = 20.0  # work of one queue begins so soon after the work before it
_LEAST_PROOFS = 16
_MOST_EXCEPTIONS = 0.02  # of the proofs


def find_stream_order(job: TracedJob) -> tuple[F64, ...] | None:
    """Return the µs for which the order of launches held up each operation, per rank; None if streams do not share."""
    found, proofs, exceptions = [], 0, 0
    for d in job.digests:
        gpu, lost = d.gpu, np.zeros(len(d.gpu))
        order = np.flatnonzero(np.isfinite(gpu.launch_start))
        order = order[np.argsort(gpu.launch_start[order], kind="stable")]
        before, then = order[:-1], order[1:]
        apart = (gpu.stream[before] != gpu.stream[then]) & (gpu.launch_start[before] < gpu.launch_start[then])
        apart &= device_of(gpu.stream[before]) == device_of(gpu.stream[then])
        before, then = before[apart], then[apart]
        previous = previous_on_stream(gpu.stream)[then]
        ready = np.maximum(gpu.launch_end[then], np.where(previous >= 0, gpu.end[previous], -np.inf))
        waited = gpu.start[before] - ready
        could = waited > _READY_US
        exceptions += int((could & (gpu.start[then] < gpu.start[before] - ROUNDED_US)).sum())
        until = np.minimum(gpu.start[before] + _TOGETHER_US, gpu.end[before])
        follows = could & (gpu.start[then] >= gpu.start[before]) & (gpu.start[then] < until)
        proofs += int((follows & ((gpu.kind[before] == Kind.COMM) != (gpu.kind[then] == Kind.COMM))).sum())
        lost[then[follows]] = waited[follows]
        found.append(lost)
    return tuple(found) if proofs >= _LEAST_PROOFS and exceptions <= _MOST_EXCEPTIONS * proofs else None
