"""Ranks of gloo groups: pools for each world size, used by many tests, and ranks that may die, for one program each.

All are forked from one process that has imported torch already, so that a rank costs no import.
"""

import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.processes import reserved_port
from tests.support.command import HANG_S

TIMEOUT_S = 900.0  # of communicators and groups that nobody waits for in vain: a busy machine needs less
SOON_S = 300.0  # told by a watchdog or a peer, not by a time-out
patient = partial(CommunicatorOptions, timeout_s=TIMEOUT_S)
PATIENT = patient()
Program = Callable[..., Any]
Answer = tuple[bool, Any] | None  # whether the program ended well, and what it gave or why not; None: the rank died
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "counterpoint.measurement.session", "counterpoint.collectives.communicator", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "pytest",
])  # fmt: skip


class Ranks:
    """`run(program, *arguments)` calls a module-level function on every rank and returns what each gave."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.start()

    def start(self) -> None:
        self.reserved = ExitStack()
        port = self.reserved.enter_context(reserved_port())
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.world_size):
            here, there = _FORKS.Pipe()
            process = _FORKS.Process(target=_serve, args=(there, rank, self.world_size, port), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, program: Program, *arguments: Any) -> list[Any]:
        """Return what the program gave on each rank."""
        try:
            answers = self.answers(program, arguments)
            if None in answers:
                raise EOFError(f"rank {answers.index(None)} died")
            return [value for _, value in filter(None, answers)]
        except (AssertionError, TimeoutError, EOFError, BrokenPipeError):
            self.close()
            self.start()  # for the tests that come after
            raise

    def answers(self, program: Program, arguments: tuple[Any, ...]) -> list[Answer]:
        """Return what each rank gave; None for one that died."""
        for pipe in self.pipes:
            pipe.send((program, arguments))
        answers: dict[Connection, Answer] = {}
        failed: list[str] = []
        while len(answers) < self.world_size:
            ready = wait([pipe for pipe in self.pipes if pipe not in answers], 30.0 if failed else HANG_S)
            for pipe in (one for one in self.pipes if one in ready):
                answers[pipe] = answer = _received(pipe)
                if answer is not None and not answer[0]:
                    failed.append(f"rank {self.pipes.index(pipe)}: {answer[1]}")
            if not ready and not failed:
                raise TimeoutError(f"a rank neither answered nor died within {HANG_S} s")
            if not ready:
                break
        assert not failed, "\n".join(failed)
        return [answers[pipe] for pipe in self.pipes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.reserved.close()


def run_once(world_size: int, program: Program, *arguments: Any) -> list[Any]:
    """Return what `program` gave on each rank of a new gloo group; of a rank that was killed, its exit code."""

    ranks = Ranks(world_size)
    try:
        given = ranks.answers(program, arguments)
        for process, answer in zip(ranks.processes, given, strict=True):
            if answer is None:
                process.join()
        return [
            process.exitcode if answer is None else answer[1]
            for process, answer in zip(ranks.processes, given, strict=True)
        ]
    finally:  # no rank goes before, while others may still need it
        ranks.close()


def finding(found: dict[str, tuple[int, Program, tuple[Any, ...], Any]]) -> Any:
    """Return a test of rows: the number of ranks, the program that they run, its arguments, and what each gives."""

    @pytest.mark.parametrize(("world_size", "program", "arguments", "wanted"), found.values(), ids=found)
    def test(
        request: pytest.FixtureRequest, world_size: int, program: Program, arguments: tuple[Any, ...], wanted: Any
    ) -> None:
        ranks: Ranks = request.getfixturevalue(f"{('two', 'three', 'four')[world_size - 2]}_ranks")
        assert ranks.run(program, *arguments) == [wanted] * world_size

    return test


def _received(pipe: Connection) -> Answer:
    try:
        answer: Answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
    return answer


def said(call: Callable[[], object]) -> tuple[str, tuple[int, ...], float]:
    """Return the kind and the text of the error that a call raises, or "", the ranks that it names, and the seconds."""
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "ranks", ()), time.monotonic() - begun
    return "", (), time.monotonic() - begun


def error_of(call: Callable[[], object]) -> str:
    """Return the kind and the text of the error that a call raises, or "nothing"."""
    return said(call)[0] or "nothing"


def end_operations(_: object = None) -> None:
    """Close the tensor groups, dispatchers and communicators of process groups that stay, on all ranks together."""
    registries = {"tensor.group": "_GROUPS", "expert.titan_dispatcher": "_DISPATCHERS", "group": "_GROUPS"}
    for module, name in registries.items():
        registry: Any = getattr(sys.modules.get(f"counterpoint.parallel.{module}"), name, None)
        if registry is not None:
            for group in list(registry._made):
                registry.close(group)


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

    session = Session("cpu", timeout_s=TIMEOUT_S)
    while True:
        try:
            program, arguments = pipe.recv()
        except EOFError:  # whoever asked has gone
            return
        try:
            pipe.send((True, program(session, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
