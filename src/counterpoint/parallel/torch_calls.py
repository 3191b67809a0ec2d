"""Read arguments of torch's calls, wrap a communicator's works as torch's `Work`, and hide code from torch.compile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork
from torch._C._dynamo import eval_frame

from counterpoint.collectives.work import Work

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnyClass = TypeVar("AnyClass", bound=type)
# does what torch.compiler.disable does, without loading the compiler
_SKIP: Any = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def uncompiled(function: AnyFunction) -> AnyFunction:
    """Make torch.compile end a graph at `function`, so that the host code in it runs at every call."""
    disabled: AnyFunction = torch.compiler.disable(function)
    return disabled


def never_compiled(kind: AnyClass) -> AnyClass:
    """Make torch's compiler skip all methods of a class, even where compiled DDP calls them; return the class."""
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, _SKIP)
    return kind


@never_compiled
class StartedWork(TorchWork):
    """Represents a call of a communicator as torch's `Work`.

    Args:
        works: the communicator's works; none if the call has ended, or runs on the current stream.
        outputs: tensors that the call writes.
        future: the future of the outputs; None: it is made when it is asked for.
    """

    def __init__(self, works: list[Work], outputs: list[Tensor], future: Any = None) -> None:
        super().__init__()
        self.works, self._outputs, self._future = works, outputs, future
        self.was_waited_for = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream (on a CPU, this thread) wait for the call; raise the call's error."""
        seconds = timeout.total_seconds() if timeout else None  # torch passes zero where no timeout is given
        for work in self.works:
            work.wait(seconds or None)
        self.was_waited_for = True
        return True

    def synchronize(self) -> None:
        """Let the current stream (on a CPU, this thread) wait for the call, as `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait for the call, as `wait` does; on a GPU the host does not wait."""
        self.wait()

    def is_started(self) -> bool:
        """Return whether the call is under way or has ended, and does not wait for a thread to start it."""
        return self._future is None or not self.works or self._future.done()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the error with which the call failed; None if no error is known so far."""
        return next((error for work in self.works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the outputs; on a GPU, waiting for the future makes the stream wait for the call."""
        if self._future is None:
            on_gpu = any(tensor.is_cuda for tensor in self._outputs)
            self._future = self._future_in_stream() if on_gpu else self._future_by_thread()
        return self._future

    def _future_in_stream(self) -> Any:
        """Return a completed future, whose CUDA event, for other streams to wait for, is on the call's stream."""
        device = self._outputs[0].device
        future: Any = torch.futures.Future(devices=[device])
        ended = getattr(self.works[0], "ended", None) if len(self.works) == 1 else None
        if ended is not None:
            with torch.cuda.stream(_stream(ended.stream, device)):
                future.set_result(self._outputs)
            return future
        for work in self.works:  # empty if the current stream runs the call
            work.wait()
        future.set_result(self._outputs)
        return future

    def _future_by_thread(self) -> Any:
        future: Any = torch.futures.Future()

        def wait() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._outputs)

        if self.is_completed():
            wait()
        else:
            threading.Thread(target=wait, name="counterpoint-future", daemon=True).start()
        return future


def together(started: list[StartedWork]) -> StartedWork:
    """Return one work that waits for all calls in `started`."""
    works = [work for one in started for work in one.works]
    return StartedWork(works, [tensor for one in started for tensor in one.result()])


@lru_cache(maxsize=64)
def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, device)


_REDUCTIONS = tuple((getattr(dist.ReduceOp, name.upper()), name) for name in ("sum", "avg", "max", "min"))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; a sparse one, which has no `nbytes`, counts as if it were dense."""
    return tensor.numel() * tensor.element_size()


def call_options(kind: Any, given: Any, name: str, value: Any, timeout: Any) -> Any:
    """Return a call's options as an object of class `kind`, made from a single option if torch passes one."""
    if isinstance(given, kind):
        return given
    options = kind()
    for key, one in ((name, given if value is None else value), ("timeout", timeout)):
        if one is not None:
            setattr(options, key, one)
    return options


def op_and_factor(op: Any) -> tuple[str, float]:
    """Return a communicator's name for torch's reduction `op`, and the factor of a PREMUL_SUM (else 1).

    A PREMUL_SUM by a tensor, which no communicator has, is called `premul_sum by a tensor`.
    """
    for known, name in _REDUCTIONS:
        if op == known:
            return name, 1.0
    if isinstance(op, dist.ReduceOp.RedOpType):
        return op.name.lower(), 1.0
    kind: Any
    factor: Any
    kind, factor = op.__getstate__()  # its pickled state: the only access to the factor in torch 2.11
    name = kind.name.lower()
    if name != "premul_sum" or isinstance(factor, float):
        return name, factor if isinstance(factor, float) else 1.0
    return f"{name} by a tensor", 1.0


def reduces(op: str, dtype: torch.dtype) -> bool:
    """Return whether a communicator can do the reduction `op`, a name of `op_and_factor`, in this dtype."""
    if op == "premul_sum":
        return dtype in _FLOATS
    known = any(op == one for _, one in _REDUCTIONS)
    return known and (dtype in _FLOATS or (dtype in _INTEGERS and op != "avg"))
