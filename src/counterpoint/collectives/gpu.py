"""One GPU as a communicator uses it: what it needs of torch and of the driver, so that something else can stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from counterpoint.collectives.cuda import load_driver
from counterpoint.collectives.cuda_memory import CudaCard, CudaMemory, why_not
from counterpoint.collectives.group import gathered
from counterpoint.collectives.lower import ReduceLaunch
from counterpoint.collectives.reduce import Reduction, bind
from counterpoint.collectives.symmetric import SymmetricMemory
from counterpoint.errors import Unsupported

__all__ = ["Gpu"]


class Gpu:
    """This process's GPU.

    Args:
        device: torch.device; without an index the current one.

    Raises:
        Unsupported: no CUDA in this torch, no GPU, or no cuda-bindings.
    """

    def __init__(self, device: Any) -> None:
        import torch

        if not torch.cuda.is_available():
            raise Unsupported(f"{device}: torch {torch.__version__} sees no GPU here")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.driver = load_driver()
        self._sms = torch.cuda.get_device_properties(index).multi_processor_count
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the context, if nothing has yet
            _, self._context = self.driver.cuCtxGetCurrent()
        self._raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", self._public_stream)

    def why_not(self, group: Any) -> str | None:
        """Why the ranks of `group` cannot share their GPUs' memory; None if they can. All ranks call it."""
        return why_not(gathered(group, CudaCard.of(self.device.index)))

    def memory(self, group: Any) -> SymmetricMemory:
        """What it shares with the GPUs of the group."""
        import torch.distributed as dist

        return CudaMemory(dist.group.WORLD if group is None else group, self.device.index)

    def current_stream(self) -> int:
        """Handle of the stream that torch uses now, in this thread."""
        return int(self._raw_stream(self.device.index))

    def _public_stream(self, index: int) -> int:
        import torch

        return int(torch.cuda.current_stream(index).cuda_stream)

    def capture_of(self, stream: Any) -> int:
        """Number of the capture that the stream (a `CUstream`) is in; 0 if it is in none.

        Raises:
            Unsupported: the driver refused.
        """
        error, status = self.driver.cuStreamIsCapturing(stream)
        if error or not status:
            return 0
        error, _, number, *_ = self.driver.cuStreamGetCaptureInfo(stream)
        if error:
            raise Unsupported(f"cuStreamGetCaptureInfo failed: {error}; end the capture, and look for its error")
        return int(number)

    def bind_reduction(self, call: ReduceLaunch, stream: int, reduction: Reduction) -> Callable[[], object]:
        """What launches `call` on the stream."""
        return bind(call, reduction, stream=stream, device_sms=self._sms)

    def enter_thread(self) -> None:
        """Called by a thread of our own before it calls the driver: this GPU's context, and no part in the captures of
        others, during which the driver forbids even to ask for events."""
        self.driver.cuCtxSetCurrent(self._context)
        self._exchange(self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """In a capture of this thread, what the driver forbids there by default: events of other streams are asked,
        kernels are loaded. None of that is captured."""
        before = self._exchange(self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            self._exchange(before)

    def _exchange(self, mode: Any) -> Any:
        return self.driver.cuThreadExchangeStreamCaptureMode(mode)[1]

    @contextmanager
    def current(self) -> Iterator[None]:
        """This GPU's context is the current one, whatever the thread had before, and has again afterwards."""
        self.driver.cuCtxPushCurrent(self._context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent()

    def synchronize(self) -> None:
        """Waits for the current stream."""
        import torch

        torch.cuda.current_stream(self.device).synchronize()
