"""Stands in for `cuda.bindings.driver`: writes down what is called, and can be told to refuse."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

from counterpoint.collectives.cuda.lower import CopyAsync, DriverCall, MemoryOperation, MemoryOperations
from counterpoint.collectives.program.steps import AwaitEvent, RecordEvent

KINDS: dict[int, Literal["wait", "write"]] = {1: "wait", 2: "write"}


class FakeDriver:
    """Handles are integers; every function succeeds, and gives a new handle where the real one does."""

    CUdeviceptr = CUstream = int
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUgraphInstantiate_flags = SimpleNamespace(CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY=8)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_BUFFER_ID=7)
    CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_32=1, CU_STREAM_MEM_OP_WRITE_VALUE_32=2)

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.refuse: dict[str, Any] = {}
        self._handles = 1000
        self.allocations: dict[int, tuple[int, int]] = {}  # bytes and number of each, by its first address

    @staticmethod
    def CUstreamBatchMemOpParams() -> SimpleNamespace:
        both = SimpleNamespace()  # a union
        return SimpleNamespace(waitValue=both, writeValue=both)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def called(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, *arguments))
            if name in self.refuse:
                return (self.refuse[name],)
            if name == "cuCtxGetStreamPriorityRange":
                return 0, 0, -5
            if name.endswith(("CreateWithPriority", "EventCreate", "EndCapture", "GraphInstantiate")):
                self._handles += 1
                return 0, self._handles
            return (0,)

        called.__name__ = name
        return called

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        return next((0, base, size) for base, (size, _) in self.allocations.items() if base <= address < base + size)

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int | None]:
        assert attribute == self.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        return (0, self.allocations[address][1]) if address in self.allocations else (1, None)

    def decoded(self, lanes: dict[int, int], events: dict[int, int]) -> list[DriverCall]:
        """What was issued, as data again; `lanes` and `events` say what each handle stands for."""
        found: list[DriverCall] = []
        for name, *arguments in self.log:
            match name:
                case "cuMemcpyDtoDAsync":
                    target, source, num_bytes, stream = arguments
                    found.append(CopyAsync(target, source, num_bytes, lanes[stream]))
                case "cuStreamBatchMemOp":
                    stream, count, parameters, flags = arguments
                    assert (count, flags) == (len(parameters), 0)
                    found.append(MemoryOperations(tuple(map(_operation, parameters)), lanes[stream]))
                case "cuEventRecord":
                    event, stream = arguments
                    found.append(RecordEvent(events.setdefault(event, len(events)), lanes[stream]))
                case "cuStreamWaitEvent":
                    stream, event, _ = arguments
                    found.append(AwaitEvent(events[event], lanes[stream]))
        return found


def _operation(entry: Any) -> MemoryOperation:
    part = entry.waitValue
    assert (part.operation, part.flags) == (entry.operation, 0)  # a union: both tags are one; 0: geq, or with a fence
    return MemoryOperation(KINDS[entry.operation], part.address, part.value)
