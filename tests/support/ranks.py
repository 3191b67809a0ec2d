"""A pool of processes that are the ranks of one gloo group: started once per world size, used by many tests."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from counterpoint.processes import reserved_port

TIMEOUT_S = 300.0  # a hang; machines may be busy


class Ranks:
    """`run(program, *arguments)` calls a module-level function on every rank and returns what each gave."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.start()

    def start(self) -> None:
        self.reserved = ExitStack()
        port = self.reserved.enter_context(reserved_port())
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.world_size, port), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            answers = self._answers(program, arguments)
        except (TimeoutError, EOFError, BrokenPipeError):
            self.close()
            self.start()  # for the tests that come after
            raise
        failed = [text for ok, text in answers if not ok]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _answers(self, program: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[bool, Any]]:
        for pipe in self.pipes:
            pipe.send((program, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S} s")
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.reserved.close()


def become(rank: int, world_size: int, port: int) -> None:
    """Set what torchrun would set in this process, and make warnings errors as they are in the tests' own."""
    warnings.simplefilter("error")
    grad = "The .grad attribute of a Tensor that is not a leaf"  # torch's compiler reads it, and only hides the warning
    warnings.filterwarnings("ignore", message=grad, module=r"torch\.")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    become(rank, world_size, port)
    from counterpoint.measurement.session import Session

    session = Session("cpu")
    while True:
        program, arguments = pipe.recv()
        try:
            pipe.send((True, program(session, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
