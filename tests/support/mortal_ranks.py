"""Ranks that may die: processes forked from one that has imported torch already, for one program each."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from counterpoint.processes import reserved_port

TIMEOUT_S = 60.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["counterpoint.measurement.session", "counterpoint.collectives.communicator"])


def run_once(world_size: int, program: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `program` gave on each rank of a new gloo group; of a rank that was killed, its exit code.

    No process is left behind.

    Raises:
        AssertionError: a rank raised.
        TimeoutError: a rank neither answered nor died.
    """
    with reserved_port() as port:
        return _ended(world_size, port, program, arguments)


def _ended(world_size: int, port: int, program: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = _FORKS.Pipe()
        process = _FORKS.Process(target=_serve, args=(there, rank, world_size, port, program, arguments), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        answers = [_answer(pipe, process) for pipe, process in zip(pipes, processes, strict=True)]
        failed = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, process: Any) -> tuple[bool, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    if not wait([pipe, process.sentinel], timeout=deadline - time.monotonic()):
        raise TimeoutError(f"a rank neither answered nor died within {TIMEOUT_S} s")
    try:
        answer: tuple[bool, Any] = pipe.recv()
        return answer
    except EOFError:
        process.join()
        return True, process.exitcode


def _serve(pipe: Connection, rank: int, world_size: int, port: int, program: Callable[..., Any], args: Any) -> None:
    from counterpoint.measurement.session import Session
    from tests.support.ranks import become

    become(rank, world_size, port)
    try:
        session = Session("cpu")
        pipe.send((True, program(session, *args)))
        pipe.recv()  # the parent ends this process: no rank goes while others may still need it
    except EOFError:
        pass
    except Exception:
        pipe.send((False, traceback.format_exc()))
