"""One rank of test_messages.py: messages through mailboxes on real GPUs; writes down what came out.

Started by path with RANK, WORLD_SIZE and the arguments: a folder for the rendezvous, what to run (`live` or `kill`).
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import counterpoint.torch_backend as backend
from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import CounterpointError, PeerTimeout
from tests.support.gpu_ranks import are_shared, own_gpu, run_scenarios

TIMEOUT_S = 20.0
LARGEST, UNBUFFERED = 128 << 20, 32 << 20
STEPS = 60 if are_shared() else 300  # where ranks share a GPU, each step waits for turns of all
EACH_S = 120.0  # for a scenario; then its rank prints where each thread stands, and ends


def filled(line: tuple[int, int], number: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """What a message of a line holds: words that no other message has at the same place."""
    start = (1 + line[0] * 8 + line[1]) * 1_000_003 + number * 7919
    return torch.arange(start, start + num_bytes // 4, dtype=torch.int32, device=device)


def by_torch(device: torch.device) -> dict[str, str]:
    """Batches around a ring without mailboxes, of more than NCCL buffers: all send first, or all receive first."""
    options = backend.BackendOptions(mailbox_bytes=None, communicator=CommunicatorOptions(timeout_s=TIMEOUT_S))
    group, rank, size = (
        dist.new_group(backend="counterpoint", pg_options=options),
        dist.get_rank(),
        dist.get_world_size(),
    )
    before, behind, wrong = (rank - 1) % size, (rank + 1) % size, 0
    for number, first in enumerate(("receives", "sends")):
        sent = filled((rank, behind), number, UNBUFFERED, device)
        output = torch.zeros_like(sent)
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=behind)
        receive = dist.P2POp(dist.irecv, output, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([receive, send] if first == "receives" else [send, receive]):
            work.wait()
        wrong += not torch.equal(output, filled((before, rank), number, UNBUFFERED, device))
    dist.destroy_process_group(group)
    return {"wrong": str(wrong)}


def itself(device: torch.device) -> dict[str, str]:
    """A batch in which each rank sends to itself and receives on another stream, before or behind."""
    group, rank = dist.new_group(backend="counterpoint"), dist.get_rank()
    streams, wrong = [torch.cuda.Stream(device) for _ in range(2)], 0
    for number, first in enumerate(("receives", "sends")):
        wanted = filled((rank, rank), number, LARGEST, device)
        sent, output = wanted.clone(), torch.zeros_like(wanted)
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=rank)
        receive = dist.P2POp(dist.irecv, output, group=group, group_peer=rank)
        works = []
        for stream, operation in zip(streams, (receive, send) if first == "receives" else (send, receive), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                works += dist.batch_isend_irecv([operation])
        for work in works:
            work.wait()
        sent.zero_()
        wrong += not torch.equal(output, wanted)
    dist.destroy_process_group(group)
    return {"wrong": str(wrong)}


def random_messages(device: torch.device) -> dict[str, str]:
    """4 B to 128 MiB over all lines, each rank's in an order of its own; sends are dropped, receives compared."""
    shared, rank = random.Random(1), dist.get_rank()
    mine, group = random.Random(rank), dist.new_group(backend="counterpoint")
    streams = [torch.cuda.Stream(device) for _ in range(24)]
    lines = list(permutations(range(dist.get_world_size()), 2))
    wrong, count = 0, 0
    for _round in range(6):
        by_line: dict[tuple[int, int], list[int]] = {line: [] for line in lines}
        left = 1 << 30
        while left > 0:
            size = 4 * round(2 ** shared.uniform(0, 25))
            by_line[shared.choice(lines)].append(min(size, LARGEST))
            left -= size
        order = [line for line in lines if rank in line for _ in by_line[line]]
        mine.shuffle(order)
        numbers, running = dict.fromkeys(lines, 0), list[tuple[Any, torch.Tensor | None, torch.Tensor]]()
        for line in order:
            number, size = numbers[line], by_line[line][numbers[line]]
            numbers[line] += 1
            with torch.cuda.stream(mine.choice(streams)):
                wanted = filled(line, number, size, device)
                if line[0] == rank:
                    running.append((dist.isend(wanted, group=group, group_dst=line[1]), None, wanted))
                else:
                    output = torch.zeros_like(wanted)
                    running.append((dist.irecv(output, group=group, group_src=line[0]), output, wanted))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        for work, received, expected in running:
            work.wait()
            if received is not None:
                wrong += not torch.equal(received, expected)
                count += 1
        torch.cuda.synchronize()  # what dies now was made on other streams
    rows = {(row.path, row.why) for row in backend.report(group).calls}
    dist.destroy_process_group(group)
    return {"wrong": str(wrong), "count": str(count), "ways": str(sorted(rows))}


def alike(device: torch.device) -> dict[str, str]:
    """All receives before all sends, then the other way round, on every line: nothing waits behind anything else."""
    group, rank, size = dist.new_group(backend="counterpoint"), dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in range(size) if peer != rank]
    wrong = 0
    for first in ("receives", "sends", "receives"):
        sent = {peer: filled((rank, peer), 1, LARGEST, device) for peer in peers}
        outputs = {peer: torch.zeros_like(sent[peer]) for peer in peers}
        sends = [dist.P2POp(dist.isend, sent[peer], group=group, group_peer=peer) for peer in peers]
        receives = [dist.P2POp(dist.irecv, outputs[peer], group=group, group_peer=peer) for peer in peers]
        for work in dist.batch_isend_irecv(receives + sends if first == "receives" else sends + receives):
            work.wait()
        wrong += sum(not torch.equal(outputs[peer], filled((peer, rank), 1, LARGEST, device)) for peer in peers)
    dist.destroy_process_group(group)
    return {"wrong": str(wrong)}


def blocking(device: torch.device) -> dict[str, str]:
    """Both ranks of a pair send first, and wait: slots suffice up to 64 MiB."""
    group, rank = dist.new_group(backend="counterpoint"), dist.get_rank()
    peer, wrong = rank ^ 1, 0
    for number, size in enumerate([4, 4096, 1 << 20, 16 << 20, 64 << 20] if peer < dist.get_world_size() else []):
        sent = filled((rank, peer), number, size, device)
        output = torch.zeros_like(sent)
        dist.send(sent, group=group, group_dst=peer)
        sent.zero_()  # may be overwritten now
        dist.recv(output, group=group, group_src=peer)
        wrong += not torch.equal(output, filled((peer, rank), number, size, device))
    dist.destroy_process_group(group)
    return {"wrong": str(wrong)}


def stepped(device: torch.device) -> dict[str, str]:
    """Steps around a ring whose buffers are written by kernels right after each wait, which the host never joins."""
    group, rank, size = dist.new_group(backend="counterpoint"), dist.get_rank(), dist.get_world_size()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    mine, theirs = (torch.zeros(3 << 20, dtype=torch.int32, device=device) for _ in range(2))
    for step in range(STEPS):
        mine.fill_(step * size + rank)
        works = [
            dist.isend(mine, group=group, group_dst=(rank + 1) % size),
            dist.irecv(theirs, group=group, group_src=(rank - 1) % size),
        ]
        for work in works:
            assert work is not None
            work.wait()
        wrong += (theirs != step * size + (rank - 1) % size).sum()
        theirs.fill_(-1)
    found = str(int(wrong))
    dist.destroy_process_group(group)
    return {"wrong": found}


def profiled(device: torch.device) -> dict[str, str]:
    """What the GPU of a sender runs for messages of 4 B to 128 MiB: rank 0 sends, rank 1 receives."""
    group, rank = dist.new_group(backend="counterpoint"), dist.get_rank()
    sizes = [4, 1 << 20, 16 << 20, LARGEST]
    tensors = [filled((0, 1), number, size, device) for number, size in enumerate(sizes)]
    seen: set[str] = set()
    count = 0
    for warm in (True, False):
        dist.barrier()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for tensor in tensors if rank < 2 else []:
                call: Callable[..., Any] = dist.isend if rank == 0 else dist.irecv
                call(tensor, group=group, **{"group_dst" if rank == 0 else "group_src": 1 - rank}).wait()
            torch.cuda.synchronize()
        if not warm and rank == 0:
            ran = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
            seen, count = set(ran), len(ran)
    dist.destroy_process_group(group)
    return {"others": str(sorted(name for name in seen if "PtoP" not in name)), "count": str(count)}


def captured(device: torch.device) -> dict[str, str]:
    """Messages around a ring in the caller's graph, with kernels around them, replayed five times."""
    with Communicator(options=CommunicatorOptions(timeout_s=TIMEOUT_S, mailbox_bytes=1 << 20)) as communicator:
        n, rank = communicator.world_size, communicator.rank
        mine, theirs = torch.full((1 << 20,), float(rank), device=device), torch.zeros(1 << 20, device=device)
        seen, place = torch.zeros(5, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            mine.add_(1)
            going = communicator.send(mine, (rank + 1) % n, async_op=True)
            coming = communicator.recv(theirs, (rank - 1) % n, async_op=True)
            assert going is not None
            assert coming is not None
            coming.wait()
            seen.index_copy_(0, place, theirs.mean().view(1))
            place.add_(1)
            going.wait()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        communicator.check()
        found, wanted = seen.tolist(), [float((rank - 1) % n + k) for k in range(1, 6)]
        del graph
    return {"seen": "equal" if found == wanted else f"{found} instead of {wanted}"}


LIVE: dict[str, Callable[[torch.device], dict[str, str]]] = {
    "blocking": blocking,
    "alike": alike,
    "steps": stepped,
    "profile": profiled,
    "captured": captured,
    "by torch": by_torch,
    "to itself": itself,
    "random": random_messages,
}


def killed(device: torch.device, rank: int) -> dict[str, str]:
    """Rank 1 is killed while rank 0 waits for its message; what it is told, and whether its GPU is free then."""
    group = dist.new_group(
        backend="counterpoint", pg_options=backend.BackendOptions(communicator=CommunicatorOptions(timeout_s=TIMEOUT_S))
    )
    dist.barrier()  # ranks 2 and higher leave at once, and gloo may still be connecting others to them
    tensor, seen, started = torch.ones(1000, device=device), "nothing", time.monotonic()
    try:
        if rank == 1:
            dist.send(tensor, group=group, group_dst=0)
            torch.cuda.synchronize()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            dist.recv(tensor, group=group, group_src=1)
            torch.cuda.synchronize()
            started = time.monotonic()
            work: Any = dist.irecv(tensor, group=group, group_src=1)
            while work.exception() is None and time.monotonic() < started + TIMEOUT_S:
                time.sleep(0.01)
            work.wait()
    except PeerTimeout as error:
        seen = f"PeerTimeout {error.ranks}"
    except CounterpointError as error:
        seen = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    torch.cuda.synchronize()  # would hang if a stream still waited
    return {"told": seen, "soon": str(seconds < 5)}


def main(folder: Path, what: str) -> None:
    if what == "live":
        scenarios = {name: partial(scenario, own_gpu()) for name, scenario in LIVE.items()}
        run_scenarios(folder, scenarios, each_s=EACH_S)
    else:
        run_scenarios(folder, {"killed": lambda: killed(own_gpu(), dist.get_rank())}, with_nccl=False)
    sys.stdout.flush()
    os._exit(0)  # with a dead peer the process group cannot be left


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
