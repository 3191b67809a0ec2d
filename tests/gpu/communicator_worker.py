"""One rank of test_communicator.py: the communicator on real GPUs; writes down what came out.

Started by path with RANK, WORLD_SIZE and the arguments: a folder for the rendezvous, what to run (`live` or `kill`).
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives_random import Draws

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import CounterpointError, PeerTimeout
from tests.support.gpu_ranks import free_bytes, own_gpu, run_scenarios

BUDGET_S = float(os.environ.get("COUNTERPOINT_RANDOM_S", "20"))  # for the random calls
TIMEOUT_S = 20.0
STEPS = 1000


def all_of(mine: bool, device: torch.device) -> bool:
    """Whether it is so on every rank: all of them stop at the same call."""
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def random_calls(device: torch.device) -> dict[str, str]:
    """Whatever benchmarks/collectives_random.py draws, until the time is up."""
    with Communicator(options=CommunicatorOptions(timeout_s=TIMEOUT_S)) as communicator:
        draws = Draws(communicator, seed=1, max_bytes=16 << 20)
        deadline, count, told = time.monotonic() + BUDGET_S, 0, ""
        while all_of(not told and time.monotonic() < deadline, device):
            told = draws.one(count)
            count += 1
        torch.cuda.synchronize()
        communicator.check()
        return {"mismatch": told or "none", "count": str(count)}


def stepped(device: torch.device, early: bool) -> dict[str, str]:
    """1,000 steps whose buffers die with kernels on them still queued, on two streams, nothing waited for."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with Communicator(options=CommunicatorOptions(timeout_s=TIMEOUT_S)) as communicator:
        n, rank = communicator.world_size, communicator.rank
        seen = []
        for step in range(STEPS):
            with torch.cuda.stream(streams[step % 2]):
                shards = communicator.empty(n, 1 << (12 + step % 5), dtype=torch.int32, early_release=early)
                shards[rank].fill_(step * n + rank)
                work = communicator.all_gather(shards, shards[rank], async_op=step % 3 == 0, channel=step % 2)
                if work is not None:
                    work.wait()
                ranks = torch.arange(n, device=device, dtype=torch.int32)[:, None] + step * n
                different = (shards != ranks).sum()
                streams[step % 2].wait_stream(streams[1 - step % 2])  # `wrong` is one tensor
                wrong += different
                del shards, work
            if step in (STEPS // 10, STEPS - 1):
                torch.cuda.synchronize()
                transport: Any = communicator._transport
                seen.append((free_bytes(device) >> 20, len(transport.context.memory._regions)))
        communicator.check()
    (free, regions), (free_later, regions_later) = seen
    return {
        "wrong": str(int(wrong)),
        "regions": "same" if regions == regions_later else f"{regions}, then {regions_later}",
        "memory": "same" if free - free_later < 64 else f"{free} MiB free, then {free_later}",
    }


def captured(device: torch.device) -> dict[str, str]:
    """A gather and a sum in the caller's graph, with kernels around them, replayed five times."""
    with Communicator(options=CommunicatorOptions(timeout_s=TIMEOUT_S)) as communicator:
        n, rank = communicator.world_size, communicator.rank
        shards, total = communicator.empty(n, 1000).fill_(rank), communicator.empty(4096).zero_()
        communicator.all_reduce(total)  # makes staging
        seen = torch.zeros(5, device=device)
        place = torch.zeros(1, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            shards[rank].add_(1)
            work = communicator.all_gather(shards, shards[rank], async_op=True)
            assert work is not None
            work.wait()
            total.fill_(1).mul_(shards[:, 0].sum())  # numbers that float32 has, whatever the order
            communicator.all_reduce(total)
            seen.index_copy_(0, place, total[:1])
            place.add_(1)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        communicator.check()
        wanted = [n * (n * (n - 1) / 2 + n * k) for k in range(1, 6)]
        found = seen.tolist()
        del graph
        return {"seen": "equal" if found == wanted else f"{found} instead of {wanted}"}


def meets_others_first(device: torch.device) -> dict[str, str]:
    """Rank 0 has made memory alone before all make memory together: torch has counted other meetings there."""
    group = dist.new_group([0])
    alone = Communicator(group, device=device) if dist.get_rank() == 0 else None
    with Communicator(device=device, options=CommunicatorOptions(timeout_s=TIMEOUT_S)) as communicator:
        whole = communicator.empty(communicator.world_size, 8, dtype=torch.int32)
        communicator.all_gather(whole, torch.full((8,), communicator.rank, dtype=torch.int32, device=device))
        found = whole[:, 0].tolist()
        communicator.check()
    if alone is not None:
        alone.close()
    return {"right": str(found == list(range(dist.get_world_size())))}


def new_threads(device: torch.device) -> dict[str, str]:
    """What each verb is told in a thread of its own that has done nothing on a GPU, and in autograd's."""
    n, rank, made = dist.get_world_size(), dist.get_rank(), dict[str, Any]()
    mine, received = torch.ones(n, 1024, device=device), torch.empty(n, 1024, device=device)
    torch.cuda.synchronize()

    def opens() -> None:
        made["all"] = Communicator(
            device=device, options=CommunicatorOptions(timeout_s=TIMEOUT_S, mailbox_bytes=1 << 20, channels=3)
        )

    def calls(name: str, *options: Any, **keywords: Any) -> Callable[[], object]:
        return lambda: getattr(made["all"], name)(*options, **keywords)

    def empties(early: bool) -> None:
        made["block"] = None  # its memory is collected by this thread
        made["block"] = made["all"].empty(n, 1024, early_release=early)

    def pools() -> None:
        with made["all"].memory_pool():
            made["pooled"] = torch.empty(1 << 20, device=device)

    def sends() -> None:
        work = made["all"].send(mine, (rank + 1) % n, async_op=True)
        made["all"].recv(received, (rank - 1) % n)
        work.wait()

    def cuts() -> None:
        rows = made["all"].empty(n * n, 1024)
        work = made["all"].partitioned_all_gather(rows, mine, chunk_rows=1, supplied=False, channel=1)
        work.ready(1)
        work.arrived(1)
        work.finish()
        made["cut"] = rows

    def begins() -> None:
        made["work"] = made["all"].all_reduce(mine, "max", async_op=True)

    class Gathers(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Any) -> Any:
            return input.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            communicator = made["all"]
            made["gathered"] = communicator.empty(n, 64)
            communicator.all_gather(made["gathered"], made["gathered"][rank].fill_(rank))
            return gradient

    def differentiates() -> None:
        Gathers.apply(torch.ones(4, device=device, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]

    verbs: list[tuple[str, Callable[[], object]]] = [
        ("Communicator", opens),
        ("empty", lambda: empties(False)),
        ("empty(early_release)", lambda: empties(True)),
        ("all_gather", lambda: made["all"].all_gather(made["block"], made["block"][rank])),
        ("empty", lambda: empties(False)),
        ("memory_pool", pools),
        ("is_symmetric", lambda: made["all"].is_symmetric(made["block"])),
        ("record_stream", lambda: made["all"].record_stream(made["block"])),
        ("all_reduce", calls("all_reduce", mine, "max")),
        ("reduce_scatter", lambda: made["all"].reduce_scatter(made["block"][rank], mine, "max")),
        ("broadcast", calls("broadcast", mine)),
        ("all_to_all", lambda: made["all"].all_to_all(made["block"], mine)),
        ("barrier", calls("barrier", channel=2)),
        ("send", sends),
        ("partitions", cuts),
        ("async_op", begins),
        ("is_completed", lambda: made["work"].is_completed()),
        ("wait", lambda: made["work"].wait()),
        ("wait(timeout_s)", lambda: made["work"].wait(TIMEOUT_S)),
        ("backward", differentiates),
        ("check", calls("check")),
        ("close", calls("close")),
    ]
    told = list[str]()

    def tries(name: str, verb: Callable[[], object]) -> None:
        try:
            verb()
        except Exception as error:
            told.append(f"{name}: {type(error).__name__}: {error}")

    for name, verb in verbs:
        thread = threading.Thread(target=tries, args=(name, verb))
        thread.start()
        thread.join()
        if not all_of(not told, device):
            break
    torch.cuda.synchronize()
    return {"told": "\n".join(told)}


LIVE: dict[str, Callable[[torch.device], dict[str, str]]] = {
    "steps": lambda device: stepped(device, False),
    "early steps": lambda device: stepped(device, True),
    "captured": captured,
    "new threads": new_threads,
    "meets others first": meets_others_first,
    "random": random_calls,
}


def killed(device: torch.device, rank: int) -> dict[str, str]:
    communicator = Communicator(device=device, options=CommunicatorOptions(timeout_s=TIMEOUT_S))
    shards = communicator.empty(communicator.world_size, 1 << 20)
    total = communicator.empty(1 << 20).zero_()
    dies = time.monotonic() + 0.5 + random.Random(os.environ["MASTER"]).random()
    seen, started = "nothing", 0.0
    try:
        while True:
            if rank == 1 and time.monotonic() > dies:
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.monotonic()
            communicator.all_gather(shards, shards[rank])
            communicator.all_reduce(total, async_op=True)
            torch.cuda.synchronize()
            communicator.check()
    except PeerTimeout as error:
        seen = f"PeerTimeout {error.ranks}"
    except CounterpointError as error:
        seen = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    torch.cuda.synchronize()  # would hang if a stream still waited
    communicator.close()
    return {"told": seen, "soon": str(seconds < 5), "seconds": f"{seconds:.2f}"}


def main(folder: Path, what: str) -> None:
    if what == "live":
        run_scenarios(folder, {name: partial(scenario, own_gpu()) for name, scenario in LIVE.items()})
    else:
        run_scenarios(folder, {"killed": lambda: killed(own_gpu(), dist.get_rank())}, with_nccl=False)
    sys.stdout.flush()
    os._exit(0)  # with a dead peer the process group cannot be left


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
