"""From a mechanism to something that can be launched: process group, buffers, streams with its controls applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.controls.control import Lanes
from counterpoint.controls.nccl_windows import NcclWindows
from counterpoint.errors import Unsupported
from counterpoint.measure.comm import Buffers, Comm, Empty, allocate, plain_memory
from counterpoint.measure.names import BASES, Mechanism
from counterpoint.measure.session import Session
from counterpoint.measure.stage import Case, Trial

__all__ = ["Memory", "Opened", "OpenedAll", "memory_of", "offered", "open_all", "open_mechanism"]

Memory: TypeAlias = Literal["plain", "symmetric", "windows"]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A mechanism ready to run one collective.

    `lanes` have the controls applied; `alone` has those of the collective only, and the computation as it is.
    """

    mechanism: Mechanism
    comm: Comm
    lanes: Lanes
    alone: Lanes

    def trial(self, session: Session, what: str) -> Callable[[], Trial]:
        """What runs one trial of a `Case`; before each, an in-place collective gets its data back."""
        lanes = self.alone if what in ("comm_alone", "serial") else self.lanes
        case = Case(what=what)  # type: ignore[arg-type]

        def run() -> Trial:
            self.comm.reset()
            return session.stage.run(lanes, case)

        return run


def offered(
    session: Session, mechanisms: Sequence[Mechanism], collective: str
) -> tuple[tuple[Mechanism, ...], dict[str, str]]:
    """Those that can run this collective on every rank, and why each of the others cannot. All ranks call it."""
    everyone = session.gather([mechanism.why_unavailable(collective) for mechanism in mechanisms])
    first = [
        next((reason for reason in reasons if reason is not None), None) for reasons in zip(*everyone, strict=True)
    ]
    said = list(zip(mechanisms, first, strict=True))
    return (
        tuple(mechanism for mechanism, reason in said if reason is None),
        {mechanism.name: reason for mechanism, reason in said if reason is not None},
    )


def memory_of(mechanism: Mechanism) -> Memory:
    """What its buffers lie in. Mechanisms in windows have each their own, all others share those of their memory."""
    if mechanism.windows is not None:
        return "windows"
    return "symmetric" if mechanism.base == "zero_sm" else "plain"


@contextmanager
def open_mechanism(
    session: Session, mechanism: Mechanism, collective: str, numel: int, stock: Lanes, shared: dict[Memory, Buffers]
) -> Iterator[Opened]:
    """Process group, buffers and lanes of a mechanism, for as long as the context lasts. All ranks enter it together.

    Args:
        session: this rank.
        mechanism: what to open.
        collective: what it runs.
        numel: elements of the full array.
        stock: streams and computation of the pair; its `comm` is replaced.
        shared: buffers by the memory that they lie in, for all mechanisms that need no others; filled here.

    Raises:
        Unsupported: the mechanism cannot run here.
    """
    reason = mechanism.why_unavailable(collective)
    if reason is not None:
        raise Unsupported(reason)
    group = session.group(mechanism.controls)
    windows = mechanism.windows
    communicator = session.communicator if mechanism.base == "zero_sm" else None

    def make() -> Buffers:
        empty: Empty = plain_memory
        if windows is not None:
            empty = partial(windows.empty, group=group)
        elif communicator is not None:
            empty = partial(_symmetric, communicator)
        return allocate(
            collective,
            numel=numel,
            rank=session.rank,
            world_size=session.world_size,
            device=session.device,
            dtype=session.dtype,
            seed=1,
            empty=empty,
        )

    memory = memory_of(mechanism)
    if memory != "windows" and memory not in shared:
        shared[memory] = make()
    buffers = make() if memory == "windows" else shared[memory]
    comm = Comm(buffers=buffers, group=group, communicator=communicator)
    with ExitStack() as stack:
        if windows is not None:
            stack.push(partial(_release, windows))
        base = replace(stock, comm=comm.launch)
        lanes = base
        for control in mechanism.controls:
            lanes = stack.enter_context(control.apply(lanes))
        alone = replace(base, comm_stream=lanes.comm_stream)
        yield Opened(mechanism=mechanism, comm=comm, lanes=lanes, alone=alone)


def _symmetric(communicator: Communicator, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory into which peers write: without it every call would copy its output."""
    buffer: torch.Tensor = communicator.empty(numel, dtype=dtype)
    return buffer


def _release(windows: NcclWindows, kind: type[BaseException] | None, *_: object) -> None:
    """Not after an unexpected error: it waits for the GPU, which may wait for ranks that are gone."""
    if kind is None or issubclass(kind, Unsupported):
        windows.release()


@dataclass(frozen=True, kw_only=True)
class OpenedAll:
    """Several mechanisms for one pair; `plain` has no controls and is there to compare with, measured or not."""

    each: tuple[Opened, ...]
    plain: Opened
    unavailable: dict[str, str]


@contextmanager
def open_all(
    session: Session, mechanisms: Sequence[Mechanism], collective: str, numel: int, stock: Lanes
) -> Iterator[OpenedAll]:
    """Opens every mechanism that can run here, and checks what it delivers. All ranks enter it together.

    Raises:
        Unsupported: none can run here.
        WrongResult: one delivers wrong data.
    """
    shared: dict[Memory, Buffers] = {}
    unavailable: dict[str, str] = {}
    opened: list[Opened] = []
    with ExitStack() as stack:

        def enter(mechanism: Mechanism) -> Opened:
            with ExitStack() as own:  # left at once if another rank could not enter
                context = open_mechanism(session, mechanism, collective, numel, stock, shared)
                entered = session.together(lambda: own.enter_context(context))
                stack.push(own.pop_all())
                return entered

        for mechanism in mechanisms:
            try:
                opened.append(enter(mechanism))
            except Unsupported as error:
                unavailable[mechanism.name] = str(error)
        if not opened:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in unavailable.items())
            raise Unsupported(f"no mechanism can run {collective} here: {reasons}")
        for comm in {(id(each.comm.group), id(each.comm.buffers)): each.comm for each in opened}.values():
            session.together(comm.check)
        without = next((each for each in opened if not each.mechanism.controls), None)
        if without is None:
            without = enter(Mechanism(name=BASES[session.device.type][0], controls=()))
        yield OpenedAll(each=tuple(opened), plain=without, unavailable=unavailable)
