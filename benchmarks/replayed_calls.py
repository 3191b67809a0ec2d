"""Python calls and files of this package that a collective takes in its caller's thread when it comes again.

    torchrun --nproc-per-node 2 benchmarks/replayed_calls.py --out results/replayed-calls.json

`Communicator` runs on the GPU of the tests, which is made of threads; the calls through torch run on CPUs. With
`--list` every function is printed, in the order of the calls. Conditions that a CPU polls are not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from provenance import write_result
from step_rig import origin, start
from tables import print_table
from torch.distributed.fsdp import fully_shard

import counterpoint
from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.parallel.expert.dispatcher import Dispatcher
from counterpoint.parallel.fsdp.hooks import GatherHook
from counterpoint.parallel.options import BackendOptions, ExpertOptions, TensorOptions
from counterpoint.parallel.overlap import overlap
from counterpoint.parallel.tensor.group import tensor_group

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.software_gpu import SoftwareGpu

PACKAGE = f"{Path(counterpoint.__file__).parent}{os.sep}"
EVERY_SIZE = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
COLUMNS = ("call that comes again", "Python calls", "files")
BEFORE = 6  # calls before the one that is counted

Call = Callable[[], object]


class Counter:
    """Notes the functions of this package that are called while it is on, in its own thread."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        polled = caller is not None and caller.f_code.co_name == "wait_until"  # as often as a peer is late
        if event == "call" and code.co_filename.startswith(PACKAGE) and not polled:
            self.seen.append(f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note the calls that are made inside, and forget earlier ones."""
        self.seen = []
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self, name: str) -> tuple[str, str, str]:
        """Return the name, the number of Python calls, and the number of files that define these functions."""
        return name, str(len(self.seen)), str(len({each.split()[0] for each in self.seen}))


def on_software_gpu(gpu: SoftwareGpu) -> Iterator[tuple[str, Call]]:
    """Yield calls of a communicator on a GPU that is made of threads."""
    communicator = Communicator(device=gpu, options=CommunicatorOptions(timeout_s=60))
    n, rank = communicator.world_size, communicator.rank
    shards, plain = communicator.empty(n, 256), torch.ones(1024)
    mine = shards[rank]

    def waited() -> None:
        work = communicator.all_gather(shards, mine, async_op=True)
        assert work is not None
        work.wait()

    yield "Communicator.all_gather, GPU", lambda: communicator.all_gather(shards, mine)
    yield "Communicator.all_gather, async, and wait, GPU", waited
    yield "Communicator.all_reduce of plain memory, GPU", lambda: communicator.all_reduce(plain)
    gpu.synchronize()
    communicator.close()


def through_torch() -> Iterator[tuple[str, Call]]:
    """Yield calls through torch, on CPUs."""
    options = BackendOptions(crossover_bytes=EVERY_SIZE, communicator=CommunicatorOptions(timeout_s=60))
    group = dist.new_group(backend="counterpoint", pg_options=options)
    total = torch.ones(1024)
    yield "backend, dist.all_reduce, CPU", lambda: dist.all_reduce(total, group=group)

    tensor: Any = dist.new_group()
    opened = tensor_group(
        tensor.group_name, TensorOptions(mechanism="cuts", communicator=CommunicatorOptions(timeout_s=60))
    )
    a, b = torch.ones(64, 32), torch.ones(32, 16)
    operation = torch.ops.counterpoint.all_gather_matmul
    yield "torch.ops.counterpoint.all_gather_matmul, CPU", lambda: operation(a, [b], 0, tensor.group_name)
    opened.close()

    experts = Dispatcher(
        experts=4,
        top_k=2,
        max_tokens=16,
        hidden=8,
        options=ExpertOptions(mechanism="gather", communicator=CommunicatorOptions(timeout_s=60)),
    )
    x, ids, weights = torch.ones(16, 8), torch.arange(32).view(16, 2) % 4, torch.ones(16, 2)
    yield "expert dispatch, CPU", lambda: experts.finish_dispatch(experts.start_dispatch(x, ids, weights))
    experts.close()


def fsdp_gather(counter: Counter) -> None:
    """Count the calls of FSDP2's gather hook in the last forward of several, on CPUs."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    handle = overlap(model)
    hooked = GatherHook.__call__

    def counted(*arguments: Any, **options: Any) -> Any:
        with counter.on():
            return hooked(*arguments, **options)

    for _ in range(BEFORE):
        model(torch.ones(4, 16)).sum().backward()
    GatherHook.__call__ = counted  # type: ignore[method-assign]
    model(torch.ones(4, 16))
    GatherHook.__call__ = hooked  # type: ignore[method-assign]
    handle.restore()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON of the counts, and a table")
    asked = parser.parse_args()
    start("cpu")
    counter, rows = Counter(), list[tuple[str, str, str]]()

    def told(name: str) -> None:
        rows.append(counter.row(name))
        if asked.list and not dist.get_rank():
            print(name, *counter.seen, sep="\n    ")

    gpu = SoftwareGpu()
    for calls in (on_software_gpu(gpu), through_torch()):
        for name, call in calls:
            for _ in range(BEFORE):
                call()
            gpu.synchronize()
            time.sleep(0.2)  # events of calls that have ended are free then
            with counter.on():
                call()
            told(name)
    fsdp_gather(counter)
    told("FSDP2's gather, CPU")
    if not dist.get_rank():
        print_table(COLUMNS, rows)
        if asked.out is not None:
            counts = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
            write_result(asked.out, {"provenance": origin("cpu", 2), "rows": counts}, COLUMNS, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
