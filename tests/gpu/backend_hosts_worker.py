"""One rank of test_backend_hosts.py: backend `counterpoint` over two hosts, which are halves of this machine's GPUs.

Started by path with RANK, WORLD_SIZE and a folder, for the rendezvous and what came out.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from backend_hosts import OPERATIONS, Case

import counterpoint.torch_backend as backend
from counterpoint.collectives.options import CommunicatorOptions
from tests.support.gpu_ranks import are_shared

SIZES = [1 << 20, 3 << 20, 16 << 20, 64 << 20]  # bytes of the full array
if not are_shared():
    SIZES.append(256 << 20)  # each rank makes the arrays of all ranks


def case_of(name: str, num_bytes: int, dtype: torch.dtype, group: Any) -> Case:
    return Case(name, num_bytes, dtype, torch.device("cuda", torch.cuda.current_device()), group)


def cases(group: Any) -> Iterator[Case]:
    for num_bytes in SIZES:
        for number, name in enumerate(OPERATIONS):
            yield case_of(name, num_bytes, (torch.float32, torch.bfloat16)[number % 2], group)


def each_alone(ours: Any) -> str:
    """Synchronous calls, and what is read behind them on the same stream."""
    wrong = []
    for case in cases(ours):
        case.start(False)
        if count := int(case.wrong()):
            wrong.append(f"{case.name} of {case.output.nbytes} bytes: {count}")
    return "; ".join(wrong) or "none"


def waited_for_later(ours: Any) -> str:
    """Asynchronous calls beside kernels on other memory, several under way, whose inputs die before they have ended."""
    wrong, under_way = [], list[tuple[Case, Any]]()
    noise = torch.ones(1 << 24, device="cuda")

    def end() -> None:
        case, work = under_way.pop(0)
        work.wait()
        if count := int(case.wrong()):
            wrong.append(f"{case.name} of {case.output.nbytes} bytes: {count}")

    for case in cases(ours):
        work = case.start(True)
        if case.input is not case.output:
            case.input = None  # the work keeps it
        noise.mul_(1.0)
        torch.full((case.output.numel(),), 9, dtype=case.output.dtype, device="cuda")  # takes memory that is free
        under_way.append((case, work))
        if len(under_way) == 3:
            end()
    while under_way:
        end()
    return "; ".join(wrong) or "none"


def by_futures(ours: Any) -> str:
    """A future's value and what is chained to it, and `is_completed`."""
    case = case_of("all_reduce", 32 << 20, torch.float32, ours)
    work = case.start(True)
    chained = work.get_future().then(lambda done: done.value()[0] * 2)
    doubled = chained.wait()
    right = torch.equal(doubled, case.wanted * 2)
    torch.cuda.synchronize()
    return f"{'equal' if right else 'different'}, completed {work.is_completed()}, error {work.exception()}"


def on_two_streams(ours: Any) -> str:
    """Synchronous calls on two streams in turn, and asynchronous ones that another stream waits for."""
    streams, wrong = [torch.cuda.Stream() for _ in range(2)], torch.zeros((), dtype=torch.int64, device="cuda")
    made = [case_of(OPERATIONS[number % 5], 8 << 20, torch.float32, ours) for number in range(20)]
    torch.cuda.synchronize()
    for number, case in enumerate(made):
        with torch.cuda.stream(streams[number % 2]):
            work = case.start(number % 3 == 0)
        if work is not None:
            with torch.cuda.stream(streams[1 - number % 2]):
                work.wait()
            streams[number % 2].wait_stream(streams[1 - number % 2])
        with torch.cuda.stream(streams[number % 2]):
            count = case.wrong()
        torch.cuda.current_stream().wait_stream(streams[number % 2])
        wrong += count
    return str(int(wrong))


def in_symmetric_memory(ours: Any) -> str:
    """An all_gather in place in a tensor of the communicator's."""
    communicator = ours.rank_group.open(torch.device("cuda", torch.cuda.current_device()))
    rank, n, block = dist.get_rank(), dist.get_world_size(), 1 << 22
    output = communicator.empty(n * block, dtype=torch.float32)
    output[rank * block : (rank + 1) * block] = rank
    dist.all_gather_into_tensor(output, output[rank * block : (rank + 1) * block], ours)
    wanted = torch.arange(n, device="cuda").repeat_interleave(block).float()
    return f"{int((output != wanted).sum())} wrong, {communicator.is_symmetric(output)}"


def timed(group: Any, call: Callable[[Any], object]) -> float:
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.monotonic()
        call(group)
        torch.cuda.synchronize()
        best = min(best, 1e3 * (time.monotonic() - start))
    return best


def main(folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    everything = dict.fromkeys(OPERATIONS, 0)
    options = backend.BackendOptions(
        ranks_per_host=world_size // 2, crossover_bytes=everything, communicator=CommunicatorOptions(timeout_s=60)
    )
    ours = dist.new_group(backend="counterpoint", pg_options=options)
    found = {
        "alone": each_alone(ours),
        "later": waited_for_later(ours),
        "futures": by_futures(ours),
        "streams": on_two_streams(ours),
        "symmetric": in_symmetric_memory(ours),
        "paths": ",".join(sorted({row.path for row in backend.report(ours).calls})),
    }
    if rank == 0:
        print(backend.report(ours), found, sep="\n", flush=True)
    tensor = torch.ones(64 << 20, device="cuda")
    for name, group in () if are_shared() else (("counterpoint", ours), ("NCCL", dist.group.WORLD)):
        ms = timed(group, lambda group: dist.all_reduce(tensor, group=group))
        if rank == 0:
            print(f"all_reduce of 256 MiB by {name}: {ms:.1f} ms", flush=True)
    work = dist.all_reduce(tensor, group=ours, async_op=True)
    dist.destroy_process_group(ours)  # with a call under way
    del work
    torch.cuda.synchronize()
    (folder / f"found{rank}.json").write_bytes(msgspec.json.encode({"hosts": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
