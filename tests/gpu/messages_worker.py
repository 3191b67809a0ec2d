"""One rank of test_messages.py: messages through mailboxes on real GPUs; writes down what came out.

Started by path with RANK, WORLD_SIZE and the arguments: what to run (`live` or `kill`), a folder for the rendezvous.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import counterpoint.torch_backend as backend
from counterpoint.collectives.communicator import Communicator
from counterpoint.errors import CounterpointError, PeerTimeout
from tests.support.gpu_ranks import are_shared

TIMEOUT_S = 20.0
LARGEST = 128 << 20
STEPS = 60 if are_shared() else 300  # where ranks share a GPU, each step waits for turns of all
EACH_S = 120.0  # for a scenario; then its rank prints where each thread stands, and ends


def filled(line: tuple[int, int], number: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """What a message of a line holds: words that no other message has at the same place."""
    start = (1 + line[0] * 8 + line[1]) * 1_000_003 + number * 7919
    return torch.arange(start, start + num_bytes // 4, dtype=torch.int32, device=device)


def random_messages(device: torch.device) -> dict[str, str]:
    """4 B to 128 MiB over all lines, each rank's in an order of its own; sends are dropped, receives compared."""
    shared, rank = random.Random(1), dist.get_rank()
    mine, group = random.Random(rank), dist.new_group(backend="counterpoint")
    streams = [torch.cuda.Stream(device) for _ in range(24)]  # share hardware queues with others
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
    rows = {(row.path, row.why) for row in backend.report(group).rows}
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
    with Communicator(timeout_s=TIMEOUT_S, mailbox_bytes=1 << 20) as communicator:
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
    "random": random_messages,
}


def killed(device: torch.device, rank: int) -> dict[str, str]:
    """Rank 1 is killed while rank 0 waits for its message; what it is told, and whether its GPU is free then."""
    group = dist.new_group(backend="counterpoint", pg_options=backend.BackendOptions(timeout_s=TIMEOUT_S))
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


def main(what: str, folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    where = f"file://{folder / ('rendezvous ' + what).replace(' ', '_')}"
    known = "gloo" if what == "kill" else "cpu:gloo,cuda:nccl"  # NCCL would end a process whose peer has died
    dist.init_process_group(known, init_method=where, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    found: dict[str, dict[str, str]] = {}
    if what == "kill":
        found["killed"] = killed(device, rank)
    else:
        for name, scenario in LIVE.items():
            started = time.monotonic()
            faulthandler.dump_traceback_later(EACH_S, exit=True)
            found[name] = scenario(device)
            faulthandler.cancel_dump_traceback_later()
            if rank == 0:
                print(f"{name}: {time.monotonic() - started:.1f} s, {found[name]}", flush=True)
    (folder / f"{what}{rank}.json").write_bytes(msgspec.json.encode(found))
    sys.stdout.flush()
    os._exit(0)  # with a dead peer the process group cannot be left


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
