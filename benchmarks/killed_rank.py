"""Claim: when a rank is killed, every other one raises an error that names it, within seconds, and its GPU is free.

    python benchmarks/killed_rank.py --ranks 8 --out results/killed-rank-8xh200.json
    python benchmarks/killed_rank.py --ranks 4 --device cpu --programs all_gather FSDP2

Ranks share GPUs where there are fewer, as in a rehearsal: `slowest` then says little.

Ten programs: four collectives of the communicator, calls and messages of a group of backend `counterpoint`, models of
FSDP2 and DDP under `overlap`, matmuls of tensor parallelism, and tokens on their way to experts. Each runs in processes
of its own; when all ranks have done two steps, one that is drawn gets SIGKILL at a moment that is drawn.

`told`: ranks that raised; `named`: those whose error names the killed rank or, of messages, which only neighbours
exchange, one that had ended by then. `slowest`: seconds from the kill to the last of these errors. `free`: ranks whose
device ended all of its work after that. The exit status is 1 where a rank was not told, or was told of another one.
On CPUs messages go by gloo, which names nobody: they do not count there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import write_result
from step_rig import NO_MULTICAST, Step, formatted, origin, show
from torch import Tensor, nn

import counterpoint
import counterpoint.parallel.tensor.operations  # noqa: F401 - registers them
import counterpoint.torch_backend as backend
from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.parallel.expert import Dispatcher, ExpertOptions
from counterpoint.parallel.options import DdpOptions, OverlapOptions, TensorOptions
from counterpoint.parallel.tensor.group import tensor_group
from counterpoint.processes import reserved_port
from counterpoint.rehearsed import rank_variables, visible_devices

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from llama import Shape, rotary_table
from train_ddp import replicated_model
from train_fsdp import sharded_model

TIMEOUT_S = 60.0  # of all calls: whoever waits for it was not told
START_S = 300.0
FIRST_STEPS = 2
SHAPE = Shape(layers=2, hidden=128, ffn=256, heads=8, kv_heads=8, vocabulary=256)
TOKENS = 64
NUMEL = 1 << 18  # of a rank, in collectives
COLUMNS = ("program", "killed", "told", "named", "slowest s", "free", "error")
MESSAGES = "messages"
Program = Callable[[torch.device], Step]


def collective(name: str, device: torch.device) -> Step:
    """Return a call of the communicator, which ends when the device has done it."""
    communicator = Communicator(device=device, options=CommunicatorOptions(timeout_s=TIMEOUT_S))
    n, rank = communicator.world_size, communicator.rank
    whole, mine = communicator.empty(n, NUMEL), torch.ones(n, NUMEL, device=device)
    calls: dict[str, Step] = {
        "all_gather": lambda: communicator.all_gather(whole, whole[rank]),
        "reduce_scatter": lambda: communicator.reduce_scatter(whole[rank], mine),
        "all_reduce": lambda: communicator.all_reduce(whole.zero_()),
        "all_to_all": lambda: communicator.all_to_all(whole, mine),
    }

    def step() -> None:
        calls[name]()
        wait(device)
        communicator.check()

    return step


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_backend(device: torch.device) -> Step:
    """Return an all_reduce of torch.distributed by backend `counterpoint`."""
    options = backend.BackendOptions(
        crossover_bytes={"all_reduce": 0}, communicator=CommunicatorOptions(timeout_s=TIMEOUT_S)
    )
    group: Any = dist.new_group(backend="counterpoint", pg_options=options)
    tensor = torch.zeros(NUMEL, device=device)

    return lambda: ended(dist.all_reduce(tensor, group=group, async_op=True), device)


def ended(work: Any, device: torch.device) -> None:
    """Wait on the host until a call has ended, and raise its error: on a GPU `wait` lets only the stream wait."""
    while device.type == "cuda" and not work.is_completed() and work.exception() is None:
        time.sleep(1e-3)
    work.wait()
    wait(device)


def messages(device: torch.device) -> Step:
    """Return an exchange with both neighbours in a ring, as stages of a pipeline have it."""
    options = backend.BackendOptions(communicator=CommunicatorOptions(timeout_s=TIMEOUT_S))
    group: Any = dist.new_group(backend="counterpoint", pg_options=options)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(NUMEL, device=device), torch.zeros(NUMEL, device=device)

    def step() -> None:
        works: list[Any] = [
            dist.isend(mine, group=group, group_dst=(rank + 1) % size),
            dist.irecv(theirs, group=group, group_src=(rank - 1) % size),
        ]
        for work in works:
            ended(work, device)

    return step


def trained(build: Callable[[Shape, torch.device], nn.Module], options: Any, device: torch.device) -> Step:
    """Return forward and backward of a small Llama under `overlap`."""
    model: Any = build(SHAPE, device)
    handle = counterpoint.overlap(model, options=options)
    text = torch.arange(TOKENS + 1, device=device)[None] % SHAPE.vocabulary
    table = rotary_table(TOKENS, SHAPE.head_dim, device)

    def step() -> None:
        try:
            model(text[:, :-1], text[:, 1:], table).backward()
            wait(device)
        finally:
            handle.check()  # torch's reducer, which runs DDP's hook, only repeats the text of an error

    return step


def matmuls(device: torch.device) -> Step:
    """Return a matmul of gathered rows and one whose sums are scattered, in pieces."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    tensor_group(name, TensorOptions(mechanism="cuts", communicator=CommunicatorOptions(timeout_s=TIMEOUT_S)))
    rows, weight = (torch.ones(512, 512, device=device) for _ in range(2))
    operations: Any = torch.ops.counterpoint

    def step() -> None:
        _, [made] = operations.all_gather_matmul(rows, [weight], 0, name, return_gathered=False)
        operations.matmul_reduce_scatter(made, weight, "sum", 0, name)
        wait(device)
        tensor_group(name).check()

    return step


def experts(device: torch.device) -> Step:
    """Return a dispatch and a combine of tokens that all ranks' experts want."""
    size = dist.get_world_size()
    dispatcher = Dispatcher(
        experts=size, top_k=2, max_tokens=TOKENS, hidden=SHAPE.hidden,
        options=ExpertOptions(mechanism="gather", communicator=CommunicatorOptions(timeout_s=TIMEOUT_S)),
    )  # fmt: skip
    x = torch.ones(TOKENS, SHAPE.hidden, device=device)
    ids = torch.arange(2 * TOKENS, device=device).view(TOKENS, 2) % size
    weights = torch.full((TOKENS, 2), 0.5, device=device)

    def step() -> Tensor:
        rows, _, handle = dispatcher.dispatch(x, ids, weights)
        out = dispatcher.combine(rows, handle)
        wait(device)
        dispatcher.check()
        return out

    return step


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PROGRAMS: dict[str, Program] = {
    **{name: partial(collective, name) for name in COLLECTIVES},
    "backend": of_backend,
    MESSAGES: messages,
    "FSDP2": partial(trained, sharded_model, OverlapOptions(communicator=CommunicatorOptions(timeout_s=TIMEOUT_S))),
    "DDP": partial(trained, replicated_model, DdpOptions(communicator=CommunicatorOptions(timeout_s=TIMEOUT_S))),
    "tensor parallel": matmuls,
    "experts": experts,
}


def serve(pipe: Connection, program: str, kind: str, place: dict[str, str]) -> None:
    """Run a program on one rank until it raises; say when it has begun, and what it was told.

    The process group is gloo's, on GPUs too: NCCL would end a process whose peer has died.
    """
    os.environ.update(place | NO_MULTICAST, TORCH_NCCL_ENABLE_MONITORING="0")
    torch.set_num_threads(1)
    device = torch.device(kind, int(place["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    step = PROGRAMS[program](device)
    for _ in range(FIRST_STEPS):
        step()
    dist.barrier()
    pipe.send(None)
    try:
        while True:
            step()
    except Exception as error:
        told = {"at": time.monotonic(), "text": f"{type(error).__name__}: {error}", "ranks": ranks_of(error)}
    pipe.send(told)
    wait(device)  # would hang if a stream still waited
    pipe.send("free")
    os._exit(0)  # with a dead peer the process group cannot be left


def place_of(rank: int, world_size: int, kind: str, port: int) -> dict[str, str]:
    """Return the variables of a rank; ranks that are more than the GPUs share them."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place = {name: str(number) for name, number in numbers.items()}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    gpus = visible_devices(torch.cuda.device_count()) if kind == "cuda" else ()
    return place | rank_variables(rank, ranks_per_host=world_size, gpus=gpus) if 0 < len(gpus) < world_size else place


def ranks_of(error: BaseException | None) -> tuple[int, ...]:
    """Return the ranks that an error, or the one that it comes from, names."""
    while error is not None:
        ranks: tuple[int, ...] | None = getattr(error, "ranks", None)
        if ranks is not None:
            return ranks
        error = error.__cause__ or error.__context__
    return ()


def received(pipe: Connection, deadline: float) -> Any:
    """Return what a rank says; None where it ended, or said nothing in time."""
    try:
        return pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else None
    except EOFError:
        return None


def killed(program: str, kind: str, world_size: int, draw: random.Random) -> dict[str, Any]:
    """Run a program, kill a rank of it, and return what the others were told.

    Raises:
        RuntimeError: a rank did not begin.
    """
    context = multiprocessing.get_context("spawn")
    victim, after_s = draw.randrange(world_size), 0.2 + draw.random()
    pipes: list[Connection] = []
    processes: list[Any] = []
    with reserved_port() as port:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=serve, args=(there, program, kind, place_of(rank, world_size, kind, port))
                )
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            begun_by = time.monotonic() + START_S
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(0.0, begun_by - time.monotonic())):
                    raise RuntimeError(f"{program}: rank {rank} has not begun within {START_S:.0f} s")
                pipe.recv()  # raises EOFError where the rank has ended
            time.sleep(after_s)
            os.kill(processes[victim].pid, signal.SIGKILL)
            died = time.monotonic()
            others = [pipe for rank, pipe in enumerate(pipes) if rank != victim]
            told = [received(pipe, died + TIMEOUT_S) for pipe in others]
            free = [received(pipe, time.monotonic() + 10.0) for pipe in others]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return row_of(program, victim, died, told, free)


def row_of(
    program: str, victim: int, died: float, told: Sequence[dict[str, Any] | None], free: Sequence[str | None]
) -> dict[str, Any]:
    """Return how many of the other ranks were told, and how many by the right name."""
    heard = [each for each in told if each is not None]
    ended = program == MESSAGES  # a neighbour that was told has ended, too, and is named to the next
    named = [each for each in heard if victim in each["ranks"] or (ended and each["ranks"])]
    return {
        "program": program,
        "killed": victim,
        "others": len(told),
        "told": len(heard),
        "named": len(named),
        "slowest_s": max((each["at"] - died for each in heard), default=None),
        "free": sum(each == "free" for each in free),
        "error": next((each["text"] for each in heard if each not in named), heard[0]["text"] if heard else "")[:160],
    }


def is_wrong(row: dict[str, Any], kind: str) -> bool:
    """Return whether a rank was not told, not by the right name, or waits still."""
    counts = [row["told"], row["free"], *([] if kind == "cpu" and row["program"] == MESSAGES else [row["named"]])]
    return any(count != row["others"] for count in counts)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as printed, in the order of `COLUMNS`."""
    formats = {
        "program": "", "killed": "d", "told": "d", "named": "d", "slowest_s": ".2f", "free": "d", "error": "",
    }  # fmt: skip
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=tuple(PROGRAMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    """Run all programs, print a row for each, and keep them."""
    args = parsed()
    draw, rows = random.Random(args.seed), list[dict[str, Any]]()
    for program in args.programs:
        rows.append(killed(program, args.device, args.ranks, draw))
        print(rows[-1], flush=True)
    table = [list(COLUMNS), *map(cells, rows)]
    show(table)
    if args.out is not None:
        facts = origin(args.device, args.ranks)
        write_result(args.out, {"provenance": facts, "seed": args.seed, "rows": rows}, COLUMNS, table[1:])
    sys.exit(any(is_wrong(row, args.device) for row in rows))


if __name__ == "__main__":
    main()
