"""A pool of processes that are the ranks of one gloo group: started once per world size, used by many tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 90.0


class Ranks:
    """`run(program, *arguments)` calls a module-level function on every rank and returns what each gave."""

    def __init__(self, world_size: int) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world_size, port), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((program, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S} s")
            answers.append(pipe.recv())
        failed = [text for ok, text in answers if not ok]
        if failed:
            raise AssertionError(failed[0])
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def environment(rank: int, world_size: int, port: int) -> None:
    """What torchrun would tell this process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    environment(rank, world_size, port)
    from counterpoint.measure.session import Session

    session = Session("cpu")
    while True:
        program, arguments = pipe.recv()
        try:
            pipe.send((True, program(session, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
