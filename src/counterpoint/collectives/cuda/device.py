"""Define `Gpu`, the interface through which a communicator uses torch and the driver; tests replace it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from counterpoint.collectives.cuda.driver import load_driver
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.peer_access import CudaCard, prepare_process, why_not
from counterpoint.collectives.cuda.sum_launch import bind
from counterpoint.collectives.host.group import gather_values
from counterpoint.collectives.memory import SymmetricMemory
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.errors import Unsupported


@lru_cache(maxsize=1)
def raw_stream() -> Callable[[int], int]:
    """Return torch's function that maps a GPU's index to the handle of this thread's current stream on that GPU."""
    import torch

    found: Callable[[int], int] = getattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: int(torch.cuda.current_stream(index).cuda_stream)
    )
    return found


class Gpu:
    """Represents this process's GPU; `device` names the GPU, or without an index the current one.

    `Unsupported` is raised if there is no CUDA in this torch, no GPU, or no cuda-bindings.
    """

    def __init__(self, device: Any) -> None:
        import torch

        if not torch.cuda.is_available():
            raise Unsupported(f"{device}: torch {torch.__version__} sees no GPU here")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self.driver = load_driver()
        self._sms = torch.cuda.get_device_properties(index).multi_processor_count
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the context, if nothing has yet
            _, self._context = self.driver.cuCtxGetCurrent()
        self._raw_stream = raw_stream()
        self._current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self._thread = threading.local()

    def why_not(self, group: Any, *, share_gpu: bool) -> str | None:
        """Return why the ranks of `group` cannot share their GPUs' memory, None if they can; all ranks call this.

        With `share_gpu` two ranks may use one GPU.
        """
        return why_not(gather_values(group, CudaCard.of(self.device.index)), share_gpu=share_gpu)

    def memory(self, group: Any) -> SymmetricMemory:
        """Return the symmetric memory that this GPU shares with the GPUs of the group."""
        import torch.distributed as dist

        from counterpoint.collectives.cuda.regions import CudaMemory

        prepare_process(self.device.index)
        return CudaMemory(dist.group.WORLD if group is None else group, self.device.index)

    def current_stream(self) -> int:
        """Return the handle of the stream that torch uses now, in this thread."""
        return int(self._raw_stream(self.device.index))

    def capture_of(self, stream: Any) -> int:
        """Return the id of the graph capture that a `CUstream` is in, 0 if in none; raise if the driver refuses."""
        error, status = self.driver.cuStreamIsCapturing(stream)
        if error or not status:
            return 0
        error, _, number, *_ = self.driver.cuStreamGetCaptureInfo(stream)
        if error:
            raise Unsupported(f"cuStreamGetCaptureInfo failed: {error}; end the capture, and look for its error")
        return int(number)

    def bind_reduction(self, call: ReduceLaunch, stream: int, reduction: Reduction) -> Callable[[], object]:
        """Return a function that launches the reduction `call` on the stream with this handle."""
        return bind(call, reduction, stream=stream, device_sms=self._sms)

    def enter_thread(self) -> None:
        """Give the calling thread this GPU's context, and allow it to query events while other threads capture graphs.

        Without the relaxed capture mode the driver refuses to query events during a capture of another thread.
        """
        self.driver.cuCtxSetCurrent(self._context)
        self._exchange(self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow, in the `with` block, calls that the driver refuses in a graph capture, such as event queries.

        These calls do not become part of the graph.
        """
        before = self._exchange(self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            self._exchange(before)

    @contextmanager
    def beside_capture(self) -> Iterator[None]:
        """Make a new stream current in the `with` block, to allow calls that the capture on the old stream refuses."""
        import torch

        with self.relaxed(), torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    def _exchange(self, mode: Any) -> Any:
        return self.driver.cuThreadExchangeStreamCaptureMode(mode)[1]

    def is_current(self) -> bool:
        """Return whether this GPU is torch's current device in the calling thread, which then has the GPU's context.

        Torch counts device 0 as current in a new thread, such as autograd's, which has no context until its first
        kernel, so that the driver would refuse to make an event. Such a thread gets the context here, once.
        """
        if self._current_device() != self.device.index:
            return False
        if not hasattr(self._thread, "entered"):
            if not int(self.driver.cuCtxGetCurrent()[1]):
                self.driver.cuCtxSetCurrent(self._context)
            self._thread.entered = True
        return True

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU's context current in the `with` block, and restore the thread's earlier context at the end."""
        self.driver.cuCtxPushCurrent(self._context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent()

    def synchronize(self) -> None:
        """Block the host until the work on the current stream has ended."""
        import torch

        torch.cuda.current_stream(self.device).synchronize()
