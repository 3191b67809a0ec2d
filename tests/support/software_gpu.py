"""A GPU made of threads, for tests where there is none: it runs what the driver is told, on memory of the host.

Every stream is a thread that does one thing after the other; copies are memmove, waits poll their word, events mark
places in streams, a capture notes what it is given and a graph does that in order. What stands in for torch's symmetric
memory is shared memory, which all ranks make together as torch does.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.collectives.cpu.call import combine
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.host.shared_memory import ProcessCard, SharedMemory
from counterpoint.collectives.memory import Location
from counterpoint.collectives.program.reductions import Reduction

Action = Callable[[], object]
Before = Callable[[str], None]
NOT_READY, INVALID, INVALID_CONTEXT, CAPTURE_UNSUPPORTED = 600, 1, 201, 900


class Stream:
    """A thread, from the first action on, or the one of another stream that has the same hardware queue."""

    def __init__(self, handle: int, other: Stream | None = None) -> None:
        self.handle, self.by = handle, other or self
        self.capture: Capture | None = None
        self.queue: SimpleQueue[Action | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def put(self, action: Action) -> None:
        if self.capture is not None:
            self.capture.actions.append(action)
            return
        self.by.run(action)

    def run(self, action: Action) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, name=f"stream {self.handle}", daemon=True)
            self.thread.start()
        self.queue.put(action)

    def _serve(self) -> None:
        while (action := self.queue.get()) is not None:
            action()
            del action

    def close(self) -> None:
        self.queue.put(None)
        if self.thread is not None:
            self.thread.join()


class Capture:
    """What is noted between begin and end, on one stream and those that it is joined to by events."""

    numbers = itertools.count(1)

    def __init__(self, origin: Stream) -> None:
        self.number, self.origin, self.joined, self.actions = next(self.numbers), origin, [origin], list[Action]()


class Event:
    def __init__(self) -> None:
        self.passed = threading.Event()
        self.passed.set()  # one that was never recorded has passed
        self.capture: Capture | None = None


def _refusing(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`function` of a driver, which refuses in a thread that no context is current in, as that of a GPU does."""
    nothing = [None] * NUM_RESULTS.get(function.__name__, 0)

    @wraps(function)
    def called(driver: SoftwareDriver, *arguments: Any) -> tuple[Any, ...]:
        return function(driver, *arguments) if driver.has_context() else (INVALID_CONTEXT, *nothing)

    return called


NUM_RESULTS = {
    "cuEventCreate": 1, "cuGraphInstantiate": 1, "cuStreamCreateWithPriority": 1, "cuStreamEndCapture": 1,
    "cuStreamGetCaptureInfo": 5, "cuStreamIsCapturing": 1,
}  # fmt: skip


class SoftwareDriver:
    """The functions of `cuda.bindings.driver` that collectives call; each gives its error first.

    All but those of contexts refuse in a thread without a current context.

    Args:
        before: called with the name of each action right before it runs, in the thread of its stream.
    """

    CUdeviceptr = CUstream = int
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_BUFFER_ID=7)
    CUgraphInstantiate_flags = SimpleNamespace(CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY=8)
    CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WAIT_VALUE_32="wait", CU_STREAM_MEM_OP_WRITE_VALUE_32="write"
    )

    def __init__(self, before: Before | None = None) -> None:
        self.before = before
        self.streams: dict[int, Stream] = {}
        self._handles = itertools.count(1)
        self._thread = threading.local()
        self.launches = 0

    def __init_subclass__(cls) -> None:
        cls.refuse_without_context()

    @classmethod
    def refuse_without_context(cls) -> None:
        """The class's own functions of the driver begin with a look at the thread."""
        for name, function in list(vars(cls).items()):
            if name.startswith("cu") and not name.startswith(("cuCtx", "cuThread")):
                setattr(cls, name, _refusing(function))

    @property
    def _contexts(self) -> list[int]:
        """Those of this thread, the last of which is current."""
        found: list[int] = self._thread.__dict__.setdefault("contexts", [])
        return found

    def has_context(self) -> bool:
        return bool(self._contexts)

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self._contexts[-1] if self._contexts else 0

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self._contexts[-1:] = [context]
        return (0,)

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self._contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self._contexts.pop()

    @staticmethod
    def CUstreamBatchMemOpParams() -> SimpleNamespace:
        both = SimpleNamespace()
        return SimpleNamespace(waitValue=both, writeValue=both)

    def enqueue(self, stream: int, name: str, action: Action) -> None:
        def run() -> None:
            if self.before is not None:
                self.before(name)
            action()

        self.streams[stream].put(run)

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int, int]:
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:
        handle = next(self._handles)
        self.streams[handle] = Stream(handle)
        return 0, handle

    def cuStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.pop(stream).close()
        return (0,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[int]:
        self.enqueue(stream, "copy", lambda: ctypes.memmove(target, source, num_bytes))
        return (0,)

    def cuMemsetD32Async(self, target: int, value: int, count: int, stream: int) -> tuple[int]:
        words = (ctypes.c_uint32 * count).from_address(target)

        def fill() -> None:
            words[:] = [value] * count

        self.enqueue(stream, "memset", fill)
        return (0,)

    def cuStreamBatchMemOp(self, stream: int, count: int, parameters: list[Any], flags: int) -> tuple[int]:
        assert count == len(parameters) <= 255
        for entry in parameters:
            kind, part = entry.operation, entry.waitValue
            word = ctypes.c_uint32.from_address(part.address)
            self.enqueue(stream, kind, _memory_operation(kind, word, part.value))
        return (0,)

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[int]:
        self.enqueue(stream, "write", _memory_operation("write", ctypes.c_uint32.from_address(address), value))
        return (0,)

    def cuEventCreate(self, flags: int) -> tuple[int, Event]:
        return 0, Event()

    def cuEventDestroy(self, event: Event) -> tuple[int]:
        return (0,)

    def cuEventRecord(self, event: Event, stream: int) -> tuple[int]:
        event.capture = self.streams[stream].capture
        event.passed = threading.Event()
        self.streams[stream].put(_marking(event, event.capture))
        return (0,)

    def cuEventQuery(self, event: Event) -> tuple[int]:
        if event.capture is not None:
            return (CAPTURE_UNSUPPORTED,)
        return (0,) if event.passed.is_set() else (NOT_READY,)

    def cuStreamWaitEvent(self, stream: int, event: Event, flags: int) -> tuple[int]:
        there = self.streams[stream]
        if event.capture is None and there.capture is not None:
            return (CAPTURE_UNSUPPORTED,)  # a graph cannot wait for what is outside of it
        if event.capture is not None:
            if there.capture is None:
                if event.capture.actions is CLOSED:
                    return (CAPTURE_UNSUPPORTED,)
                there.capture = event.capture
                event.capture.joined.append(there)
            return (0,)  # a graph runs in order
        passed = event.passed
        there.put(lambda: passed.wait())
        return (0,)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        there = self.streams[stream]
        if there.capture is not None:
            return (CAPTURE_UNSUPPORTED,)
        there.capture = Capture(there)
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, list[Action]]:
        capture = self.streams[stream].capture
        assert capture is not None
        actions = capture.actions
        capture.actions = CLOSED
        for joined in capture.joined:
            joined.capture = None
        return 0, actions

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        return 0, int(self.streams[stream].capture is not None)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        capture = self.streams[stream].capture
        return (0, int(capture is not None), 0 if capture is None else capture.number, None, None, 0)

    def cuGraphInstantiate(self, graph: list[Action], flags: int) -> tuple[int, list[Action]]:
        return 0, list(graph)

    def cuGraphDestroy(self, graph: list[Action]) -> tuple[int]:
        return (0,)

    def cuGraphExecDestroy(self, executable: list[Action]) -> tuple[int]:
        executable.clear()
        return (0,)

    def cuGraphLaunch(self, executable: list[Action], stream: int) -> tuple[int]:
        self.launches += 1
        for action in executable:
            self.streams[stream].put(action)
        return (0,)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        return 0, address, 1 << 48  # what a test's tensor lies in is freed after its communicator

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int]:
        return 0, 1

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        return 0, 0


class OneQueueDriver(SoftwareDriver):
    """All streams run on one hardware queue, in the order in which work was issued."""

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:
        handle = next(self._handles)
        self.streams[handle] = Stream(handle, next(iter(self.streams.values()), None))
        return 0, handle


CLOSED: list[Action] = []
SoftwareDriver.refuse_without_context()


def _marking(event: Event, capture: Capture | None) -> Action:
    passed = event.passed
    return (lambda: None) if capture is not None else passed.set


def _memory_operation(kind: str, word: Any, value: int) -> Action:
    def wait() -> None:
        pause = 1e-5
        while word.value < value:
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def write() -> None:
        word.value = value

    return wait if kind == "wait" else write


class SoftwareMemory(SharedMemory):
    """Regions that all ranks of a group make together, and that stay mapped here when a peer gives its own back."""

    group: Any = None

    def create(self, num_bytes: int) -> int:
        region = super().create(num_bytes)
        dist.barrier(self.group)
        bases = [super(SoftwareMemory, self).address(rank, Location(region, 0), 1) for rank in range(self.world_size)]
        self.__dict__.setdefault("bases", {})[region] = bases
        dist.barrier(self.group)
        return region

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        address: int = self.__dict__["bases"][at.region][rank] + at.offset
        return address


class SoftwareGpu:
    """What stands in for `gpu.Gpu`; a thread has no context until it uses this GPU otherwise than by a communicator."""

    context = 1

    def __init__(self, before: Before | None = None, driver: type[SoftwareDriver] = SoftwareDriver) -> None:
        self.device, self.name = torch.device("cpu"), "software"
        self.driver = driver(before)
        self._current = threading.local()
        self._main = self.new_stream()
        self.summed_on: set[int | None] = set()  # SMs that sums were asked to run on

    def why_not(self, group: Any, *, share_gpu: bool) -> str | None:
        return None

    def memory(self, group: Any) -> SoftwareMemory:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        memory = SoftwareMemory(world_size=world_size, rank=rank, channels=1, max_bytes=1 << 28)
        memory.group = group
        cards: list[ProcessCard] = [memory.card()] * world_size
        dist.all_gather_object(cards, memory.card(), group=group)
        memory.join(cards)
        dist.barrier(group)
        return memory

    def current_stream(self) -> int:
        return getattr(self._current, "stream", self._main)

    def capture_of(self, stream: int) -> int:
        capture = self.driver.streams[stream].capture
        return 0 if capture is None else capture.number

    def bind_reduction(self, call: ReduceLaunch, stream: int, reduction: Reduction) -> Action:
        self.summed_on.add(reduction.num_sms)

        def run() -> None:
            combine(call.sources, call.target, call.num_bytes, reduction)

        return lambda: self.driver.enqueue(stream, "reduce", run)

    def enter_thread(self) -> None:
        self.driver.cuCtxSetCurrent(self.context)

    def is_current(self) -> bool:
        return self.driver.has_context()

    @contextmanager
    def current(self) -> Iterator[None]:
        self.driver.cuCtxPushCurrent(self.context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent()

    def relaxed(self) -> nullcontext[None]:
        return nullcontext()

    def beside_capture(self) -> nullcontext[None]:
        return nullcontext()

    def new_stream(self) -> int:
        """A stream of the caller's; as torch's, it makes the context current."""
        self.enter_thread()
        return self.driver.cuStreamCreateWithPriority(0, 0)[1]

    def use(self, stream: int) -> None:
        """It is the current stream of this thread from now on."""
        self._current.stream = stream

    def kernel(self, action: Action) -> None:
        """`action`, in the order of the current stream; as torch's, it makes the context current."""
        self.enter_thread()
        self.driver.enqueue(self.current_stream(), "kernel", action)

    def synchronize(self) -> None:
        done = threading.Event()
        self.driver.streams[self.current_stream()].put(done.set)
        done.wait()
