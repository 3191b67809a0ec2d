"""Issue lowered calls by the CUDA driver: copies, stream memory operations and events; kernels only for reductions.

`Executor.bind` makes handles, addresses and arrays of parameters once. What is left for each issue is a loop over
(function, arguments): 0.1 to 0.3 µs each in Python (cuda-bindings 13.0, 2026-11-21), and the driver's own time. A
graph (`Executor.graph`) replaces the loop by one driver call. `EventPool` marks points of streams by events.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial, wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from counterpoint.collectives.cuda.lower import CopyAsync, DriverCall, MemoryOperations, ReduceLaunch, awaited
from counterpoint.collectives.program.steps import COPY, REDUCE, AwaitEvent, RecordEvent
from counterpoint.errors import CounterpointError, Misconfigured, Unsupported
from counterpoint.machine.driver import call_bindings

_STREAMS_AT_ONCE = 64  # number of streams that are made together; they take 37 MB on an H200
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_spare_streams: WeakKeyDictionary[Any, dict[int, list[Any]]] = WeakKeyDictionary()  # by driver and context

Allocation: TypeAlias = tuple[int, int]
"""Types an allocation: its base address, and the number that the driver gives to no other one of the process."""
BindReduction: TypeAlias = Callable[[ReduceLaunch, int], Callable[[], object]]
"""Types a function that returns what launches a reduction on the stream with a handle."""
_Issue: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]  # a driver function, and its converted arguments
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _OnGpu(Protocol):
    _gpu: Any


_Object = TypeVar("_Object", bound=_OnGpu)


def in_context(
    method: Callable[Concatenate[_Object, _Arguments], _Result],
) -> Callable[Concatenate[_Object, _Arguments], _Result]:
    """Return `method` wrapped to run in the CUDA context of its object's `_gpu`, whichever thread calls it."""

    @wraps(method)
    def run(self: _Object, /, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        if self._gpu.is_current():
            return method(self, *arguments, **keywords)
        with self._gpu.current():
            return method(self, *arguments, **keywords)

    return run


class StreamPoint:
    """Marks a point of a stream: the end of all work that was queued on the stream before.

    When this object dies, in any thread, its event goes back to `free`, which needs no driver call. `serial` is larger
    than that of every earlier point. `capture` is the id of the graph capture that holds the point; 0: none.
    """

    __slots__ = ("_free", "capture", "event", "serial", "stream")

    def __init__(self, event: Any, stream: int, serial: int, capture: int, free: deque[Any]) -> None:
        self.event, self.stream, self.serial, self.capture, self._free = event, stream, serial, capture, free

    def __del__(self) -> None:
        self._free.append(self.event)


class StreamHandles(dict[int, Any]):
    """Maps each stream's handle to one cached `CUstream`, since the driver would convert an integer at every call."""

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self._driver = driver

    def __missing__(self, stream: int) -> Any:
        self[stream] = self._driver.CUstream(stream)
        return self[stream]


class EventPool:
    """Makes and reuses CUDA events, and marks points of streams by events."""

    def __init__(self, driver: Any) -> None:
        self._driver, self.handles = driver, StreamHandles(driver)
        self._free: deque[Any] = deque()
        self._made: list[Any] = []
        self._serials = count(1)
        self._record, self._query, self._wait = driver.cuEventRecord, driver.cuEventQuery, driver.cuStreamWaitEvent

    def take(self) -> Any:
        """Return an event that nothing else uses; raise if the driver refuses."""
        try:
            return self._free.popleft()
        except IndexError:  # no look before: another thread may take the last one at any time
            error, event = self._driver.cuEventCreate(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            if error:
                raise _refused("cuEventCreate", error) from None
            self._made.append(event)
            return event

    def give_back(self, events: Sequence[Any]) -> None:
        """Put unused events that came from `take` back into the pool."""
        self._free.extend(events)

    def record(self, stream: int, capture: int = 0) -> StreamPoint:
        """Mark the end of a stream's work so far by an event and return the point; `capture`: capture id (0: none)."""
        try:
            event = self._free.popleft()
        except IndexError:
            event = self.take()
        error = self._record(event, self.handles[stream])[0]
        if error:
            raise _refused("cuEventRecord", error)
        return StreamPoint(event, stream, next(self._serials), capture, self._free)

    def wait(self, stream: int, point: StreamPoint) -> None:
        """Make all later work of a stream wait for a point of any stream; raise if the driver refuses."""
        (error,) = self._wait(self.handles[stream], point.event, 0)
        if error:
            raise _refused("cuStreamWaitEvent", error)

    def passed(self, point: StreamPoint) -> bool:
        """Return whether the work before a point has ended; raise if an earlier call on this device failed."""
        (error,) = self._query(point.event)
        if error and int(error) != _NOT_READY:
            raise _refused("cuEventQuery", error)
        return not error

    def close(self) -> None:
        """Destroy all events."""
        while self._made:
            self._driver.cuEventDestroy(self._made.pop())
        self._free.clear()


class Executor:
    """Holds the streams and events with which programs run on one device.

    Lane `COPY` is the stream passed to `bind`, as a rule the caller's. Lane `REDUCE` is a stream of the highest
    priority: when a GEMM frees SMs, the reduction gets them before the next GEMM does.

    Streams are made many at a time, and streams of closed executors are reused: to make a stream, CUDA at times waits
    until no stream of this process waits, which lasts for ever if a peer waits for the very call that asks for the
    stream (measured: docs/log.md).

    Use it in the thread in which torch works, with this device current; it is not thread-safe. `driver` is the module
    `cuda.bindings.driver`, or a stand-in. `Unsupported` is raised if there are no cuda-bindings or no driver, or if the
    driver refused.
    """

    def __init__(self, *, driver: Any = None) -> None:
        self.driver = load_driver() if driver is None else driver
        self.events = EventPool(self.driver)
        self._streams: list[Any] = []
        self._parameters = lru_cache(maxsize=4096)(partial(_parameters, self.driver))  # messages repeat those of slots
        spare = _spare_streams.setdefault(self.driver, {})
        self._spare = spare.setdefault(int(self.call("cuCtxGetCurrent") or 0), [])
        self.side_stream = self.stream()

    @cached_property
    def reduce_stream(self) -> Any:
        """Return the stream of lane `REDUCE`, obtained at the first use."""
        return self.stream()

    def stream(self) -> Any:
        """Return a stream of the highest priority that no other executor uses until this executor is closed."""
        if not self._spare:
            flags, (_, highest) = self.driver.CUstream_flags, self.call("cuCtxGetStreamPriorityRange")
            for _ in range(_STREAMS_AT_ONCE):
                self._spare.append(self.call("cuStreamCreateWithPriority", flags.CU_STREAM_NON_BLOCKING, highest))
        self._streams.append(self._spare.pop())
        return self._streams[-1]

    def bind(self, calls: Sequence[DriverCall], stream: int, *, reduction: BindReduction | None = None) -> Bound:
        """Return a `Bound` of `calls` with converted arguments, to be issued repeatedly, eagerly or in a graph capture.

        `stream` is the handle for lane `COPY`; `reduction` binds sums, and is needed if the calls reduce.
        """
        streams = {COPY: self.driver.CUstream(stream)}
        if any(call.lane == REDUCE for call in calls):
            streams[REDUCE] = self.reduce_stream
        events = {call.event: self.events.take() for call in calls if isinstance(call, RecordEvent)}
        made = [self._issue(call, streams, events, reduction) for call in calls]
        return Bound(made, partial(self.events.give_back, tuple(events.values())))

    def allocations(self, borrowed: Iterable[tuple[int, int]]) -> tuple[Allocation, ...] | None:
        """Return the allocations that hold these (address, bytes).

        Returns:
            None if a part lies in several allocations (torch's expandable segments), any of which may be freed.
        """
        number, found = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, dict[int, int]()
        for address, num_bytes in borrowed:
            base, size = self.call("cuMemGetAddressRange", self.driver.CUdeviceptr(address))
            if address + num_bytes > int(base) + size:
                return None
            found[int(base)] = self.call("cuPointerGetAttribute", number, int(base))
        return tuple(found.items())

    def graph(
        self,
        calls: Sequence[DriverCall],
        *,
        reduction: BindReduction | None = None,
        allocations: Sequence[Allocation] = (),
    ) -> Graph:
        """Return a CUDA graph of these calls, which one driver call replays on any stream. See `bind`.

        Replays run one after the other (CUDA runs no graph at the same time as itself). In a graph capture of the
        caller, issue the `Bound` calls instead. `allocations` are those that the calls copy and others may free.
        """
        bound = self.bind(calls, int(self.side_stream), reduction=reduction)
        # relaxed: another thread of this process may allocate meanwhile, which a stricter mode turns into an error
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call("cuStreamBeginCapture", self.side_stream, mode)
        try:
            bound()
        finally:
            graph = self.call("cuStreamEndCapture", self.side_stream)
        priorities = self.driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        executable = self.call("cuGraphInstantiate", graph, priorities)
        self.call("cuGraphDestroy", graph)
        return Graph(executable, bound, self, allocations)

    def let_go(self, calls: Sequence[DriverCall]) -> None:
        """Set every flag that `calls` wait for, so that stuck streams go on; the watchdog uses this when it gives up.

        From then on the streams copy and sum wrong data, here and at peers: the group and its buffers are unusable.
        """
        for address in awaited(calls):
            self.call("cuStreamWriteValue32", self.side_stream, self.driver.CUdeviceptr(address), 1, 0)

    def close(self) -> None:
        """Destroy events and give streams back; call this last, when the GPU has finished all issued work."""
        self.events.close()
        self._spare.extend(self._streams)
        self._streams = []

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of the driver's function `name` without its error code: None, one value, or a tuple.

        Raises:
            Unsupported: the function failed.
        """
        return call_bindings(self.driver, name, *arguments)

    def _issue(
        self, call: DriverCall, streams: Mapping[int, Any], events: Mapping[int, Any], reduction: BindReduction | None
    ) -> _Issue:
        """Return the driver function that issues `call`, and its converted arguments."""
        driver, stream = self.driver, streams[call.lane]
        match call:
            case CopyAsync(target, source, num_bytes):
                where, what = driver.CUdeviceptr(target), driver.CUdeviceptr(source)
                return driver.cuMemcpyDtoDAsync, (where, what, num_bytes, stream)
            case MemoryOperations(operations):
                return driver.cuStreamBatchMemOp, (stream, len(operations), self._parameters(call), 0)
            case RecordEvent(event):
                return driver.cuEventRecord, (events[event], stream)
            case AwaitEvent(event):
                return driver.cuStreamWaitEvent, (stream, events[event], 0)
            case ReduceLaunch():
                if reduction is None:
                    raise Misconfigured("these calls reduce: give a `reduction`, which binds sums to streams")
                return reduction(call, int(stream)), ()


class Bound:
    """Holds driver functions with converted arguments, to be issued repeatedly; keeps alive the arrays they read."""

    def __init__(self, calls: Sequence[_Issue], freed: Callable[[], object]) -> None:
        self._calls, self._freed = calls, freed

    def __call__(self) -> None:
        """Issue all driver calls in order; return without waiting for the GPU.

        Raises:
            CounterpointError: the driver refused a call. Peers may wait for signals not issued: the group is unusable.
        """
        for function, arguments in self._calls:
            result = function(*arguments)
            if result and result[0]:
                raise CounterpointError(
                    f"{getattr(function, '__name__', function)} failed: {_name(result[0])}; the collective was "
                    f"issued in part, so that this group of ranks cannot be used any more"
                )

    def close(self) -> None:
        """Give the events back to the pool; call this when the GPU has run the last issue or a graph captured it."""
        self._calls = ()
        self._freed()


class Graph:
    """Holds a CUDA graph of bound calls, which `launch` replays until `is_stale`."""

    def __init__(self, executable: Any, bound: Bound, executor: Executor, allocations: Sequence[Allocation]) -> None:
        self._executable, self._bound, self._executor, self._allocations = executable, bound, executor, allocations
        driver = executor.driver
        self._launch, self._attribute = driver.cuGraphLaunch, driver.cuPointerGetAttribute
        self._number = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID

    def is_stale(self) -> bool:
        """Return whether memory that the graph copies was freed since the capture, so that it must not be replayed.

        Torch frees its cache when memory is short and when a graph capture begins; other memory may then have the
        addresses. The driver refuses to replay some of these graphs with CUDA_ERROR_INVALID_VALUE; others hang, copy
        nothing or end the process (2 H100, CUDA 13.0, 2026-11-26).
        """
        return any(self._attribute(self._number, base)[1] != number for base, number in self._allocations)

    def launch(self, stream: Any) -> None:
        """Replay the captured calls on `stream`, a `CUstream` or a handle; raise if the driver refuses."""
        (error,) = self._launch(self._executable, stream)
        if error:
            raise _refused("cuGraphLaunch", error)

    def close(self) -> None:
        """Destroy the graph; call this only when the GPU has finished the graph's last replay."""
        self._executor.call("cuGraphExecDestroy", self._executable)
        self._bound.close()


def _parameters(driver: Any, call: MemoryOperations) -> list[Any]:
    """Return the parameters of one `cuStreamBatchMemOp`, one entry for each memory operation.

    Their flags are 0: writes have a memory fence, waits are for greater or equal.
    """
    kinds = driver.CUstreamBatchMemOpType
    made = []
    for operation in call.operations:
        entry = driver.CUstreamBatchMemOpParams()
        kind = getattr(kinds, f"CU_STREAM_MEM_OP_{operation.kind.upper()}_VALUE_32")
        part = entry.waitValue if operation.kind == "wait" else entry.writeValue
        entry.operation = part.operation = kind
        part.address, part.flags, part.value = operation.address, 0, operation.value
        made.append(entry)
    return made


def hardware_queues() -> int:
    """Return over how many hardware queues CUDA spreads streams: CUDA_DEVICE_MAX_CONNECTIONS, or 8 if it is unset."""
    said = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(said) if said.isdecimal() else 8


def load_driver() -> Any:
    """Return the module `cuda.bindings.driver`; raise `Unsupported` if cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unsupported(f"collectives on GPUs need cuda-bindings: {error}; install counterpoint[torch]") from error
    return driver


def _refused(name: str, error: Any) -> CounterpointError:
    return CounterpointError(f"{name} failed: {_name(error)}; an earlier call on this device may have failed")


def _name(error: Any) -> str:
    return str(getattr(error, "name", error))
