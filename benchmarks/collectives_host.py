"""Host time of a call of the communicator on GPUs, with a driver that does nothing: what Python adds to the driver.

    python benchmarks/collectives_host.py --world-size 8

One process plays rank 0 of a group whose other ranks have always come already. No GPU and no torch CUDA is used; the
driver's own time comes on top, and is measured by `collectives_alone.py`.
"""

from __future__ import annotations

import argparse
import os
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from statistics import median
from typing import Any

import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.transport import CudaTransport
from counterpoint.collectives.host.shared_memory import SharedMemory
from counterpoint.collectives.host.watchdog import Watchdog
from counterpoint.collectives.memory import Location
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.request import message
from counterpoint.collectives.submit.submitter import Submitter
from counterpoint.machine.profile import default_profile

CALLS = 2000


class NoDriver:
    """Every function succeeds at once; handles are numbers."""

    CUdeviceptr = CUstream = int

    def __getattr__(self, name: str) -> Any:
        value: Any
        if name == "cuCtxGetStreamPriorityRange":
            value = lambda: (0, 0, -5)  # noqa: E731
        elif name.endswith(("WithPriority", "EventCreate", "EndCapture", "Instantiate", "IsCapturing")):
            value = lambda *_: (0, 0)  # noqa: E731
        elif name.startswith("cu"):
            value = lambda *_: (0,)  # noqa: E731
        else:
            value = type(name, (), {"__getattr__": lambda *_: 0, "__init__": lambda *_: None})()
        setattr(self, name, value)
        return value

    @staticmethod
    def CUstreamBatchMemOpParams() -> Any:
        part = type("Part", (), {})()
        return type("Both", (), {"waitValue": part, "writeValue": part})()


class NoMemory(SharedMemory):
    """Own memory is real, that of peers is addresses."""

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        return super().address(self.rank, at, num_bytes) + (rank << 44)


class NoGpu:
    """Rank 0 without a GPU."""

    def __init__(self) -> None:
        self.device, self.driver = torch.device("cpu"), NoDriver()

    def current_stream(self) -> int:
        return 7

    def capture_of(self, stream: int) -> int:
        self.driver.cuStreamIsCapturing(stream)
        return 0

    def bind_reduction(self, call: Any, stream: int, reduction: Any) -> Callable[[], object]:
        return lambda: None

    def is_current(self) -> bool:
        """Every thread is in its context."""
        return True

    def enter_thread(self) -> None:
        """No thread needs anything."""

    def relaxed(self) -> nullcontext[None]:
        """It forbids nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing is ever queued."""


def communicator(world_size: int, *, graphs: bool) -> Communicator:
    """Of rank 0; the statuses of its peers are its own, so that they have made each call just now."""
    hosts = SharedMemory(world_size=world_size, rank=0, channels=5, max_bytes=1 << 16)
    watchdog = Watchdog(hosts.statuses, rank=0, pids=[os.getpid()] * world_size, timeout_s=600.0)
    memory = NoMemory(world_size=world_size, rank=0, channels=1, max_bytes=1 << 28)
    options = CommunicatorOptions(channels=2, timeout_s=600.0, graphs=graphs, mailbox_bytes=1 << 20)
    made = Communicator.__new__(Communicator)
    made._transport = transport = CudaTransport(NoGpu(), memory, hosts, watchdog, options, default_profile())
    made.rank, made.world_size, made.channels, made.device = 0, world_size, 2, transport.device
    made._submit = Submitter(transport, rank=0, world_size=world_size, channels=2, debug=False).submit
    made._send_or_recv = message
    made._dropped = weakref.finalize(made, transport.abort)
    return made


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call: the median of ten batches."""
    for _ in range(10):
        call()
    batches = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(CALLS // 10):
            call()
        batches.append((time.perf_counter() - started) / (CALLS // 10) * 1e6)
        time.sleep(0.2)  # the watch looks at what was queued
    return median(batches)


def some_calls(comm: Communicator) -> dict[str, Callable[[], object]]:
    """Calls of 64 KiB a rank that come again and again, on the same buffers, and a send of ever new ones."""
    shards, full, one = comm.empty(comm.world_size, 1 << 14), comm.empty(comm.world_size << 14), torch.empty(1 << 14)
    mine, flat = shards[0], shards.view(-1)

    def asynchronous() -> None:
        work = comm.all_gather(shards, mine, async_op=True)
        assert work is not None
        work.wait()

    new = cycle([torch.empty(1 << 14) for _ in range(2000)])

    def sent(tensor: torch.Tensor) -> None:
        work = comm.send(tensor, 1, async_op=True)
        assert work is not None
        work.wait()

    return {
        "send, async, wait": lambda: sent(one),
        "send of another tensor, async, wait": lambda: sent(next(new)),
        "all_gather, in place": lambda: comm.all_gather(shards, mine),
        "all_gather, in place, async, wait": asynchronous,
        "reduce_scatter": lambda: comm.reduce_scatter(one, flat),
        "all_reduce, in place": lambda: comm.all_reduce(full),
        "all_to_all": lambda: comm.all_to_all(full, flat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=8)
    world_size = parser.parse_args().world_size
    print(f"{'call':36} {'eager µs':>9} {'graph µs':>9}")
    eager, graph = (
        [timed(call) for call in some_calls(communicator(world_size, graphs=graphs)).values()]
        for graphs in (False, True)
    )
    names = some_calls(communicator(world_size, graphs=False))
    for name, one, other in zip(names, eager, graph, strict=True):
        print(f"{name:36} {one:>9.1f} {other:>9.1f}")
    os._exit(0)  # peers that are no processes would not close


if __name__ == "__main__":
    main()
