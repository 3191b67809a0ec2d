"""FSDP2 on the communicator of GPUs, where there are none: its streams, pools, early releases and graphs are real.

Torch computes on the host, so that after each call the host waits for the stream that stands in for FSDP2's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from counterpoint.collectives.communicator import Communicator
from counterpoint.measurement.session import Session
from tests.support.ranks import TIMEOUT_S, end_operations
from tests.support.software_gpu import SoftwareGpu


class OnSoftwareGpu(Communicator):
    """Buffers made on a copy-in stream, gathers on a second, scatters on a third, as FSDP2 does."""

    def __init__(self, group: Any, *, device: Any, **options: Any) -> None:
        self.gpu = SoftwareGpu()
        self.streams = {name: self.gpu.new_stream() for name in ("copy in", "gather", "scatter")}
        super().__init__(group, device=self.gpu, **options)

    def empty(self, *shape: int, **options: Any) -> Any:
        self.gpu.use(self.streams["copy in"])
        made = super().empty(*shape, **options)
        self.gpu.synchronize()  # what its memory was used for has ended: FSDP2's copy may begin
        return made

    def all_gather(self, *arguments: Any, **options: Any) -> Any:
        return self._waited("gather", super().all_gather, *arguments, **options)

    def all_gather_coalesced(self, *arguments: Any, **options: Any) -> Any:
        return self._waited("gather", super().all_gather_coalesced, *arguments, **options)

    def reduce_scatter_coalesced(self, *arguments: Any, **options: Any) -> Any:
        return self._waited("scatter", super().reduce_scatter_coalesced, *arguments, **options)

    def reduce_scatter(self, *arguments: Any, **options: Any) -> Any:
        return self._waited("scatter", super().reduce_scatter, *arguments, **options)

    def _waited(self, stream: str, call: Any, *arguments: Any, **options: Any) -> Any:
        self.gpu.use(self.streams[stream])
        work = call(*arguments, **options)
        if work is not None:
            work.wait(TIMEOUT_S)
        self.gpu.synchronize()
        self.check()
        return work


@contextmanager
def on_software_gpu() -> Iterator[None]:
    """Let `overlap` open communicators of GPUs that are made of threads; one that a test left open on CPUs ends."""
    end_operations()
    with patch("counterpoint.parallel.group.Communicator", OnSoftwareGpu):
        yield


def run_on_software_gpu(session: Session, program: Callable[..., Any], *arguments: Any) -> Any:
    with on_software_gpu():
        return program(session, *arguments)
