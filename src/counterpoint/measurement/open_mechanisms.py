"""Prepare mechanisms for timing, and check the data that they deliver.

A collective has a process group, buffers, and streams with the controls applied (`open_all`). Matmuls and token
exchanges are run by a `Caller`, whose first result is compared with float64 (`open_checked`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch

from counterpoint.controls.control import Lanes, applied
from counterpoint.controls.nccl import NcclWindows
from counterpoint.errors import Unsupported
from counterpoint.measurement.collective import Buffers, Comm, allocate
from counterpoint.measurement.mechanisms import BASES, Mechanism, joined
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Case, Trial

if TYPE_CHECKING:
    from torch import Tensor

    from counterpoint.parallel.report import Report

Memory: TypeAlias = Literal["plain", "symmetric", "windows"]
FORCED = ("serial", "cuts", "gather", "slabs")  # may fall back to another mechanism


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Holds a mechanism that is ready to run one collective.

    `lanes` has all controls applied; `alone` has those of the collective, and the computation without any.
    """

    mechanism: Mechanism
    comm: Comm
    lanes: Lanes
    alone: Lanes

    def trial(self, session: Session, case: Case) -> Callable[[], Trial]:
        """Return a function that restores the data of an in-place collective and runs one trial."""
        lanes = self.alone if case in ("comm_alone", "serial") else self.lanes

        def run() -> Trial:
            self.comm.reset()
            return session.stage.run(lanes, case)

        return run


def offered(
    session: Session, mechanisms: Sequence[Mechanism], collective: str, unavailable: dict[str, str]
) -> list[Mechanism]:
    """Return the mechanisms that can run this collective on all ranks; put why others cannot into `unavailable`.

    All ranks call it.
    """
    everyone = session.gather([mechanism.why_unavailable(collective) for mechanism in mechanisms])
    for mechanism, reasons in zip(mechanisms, zip(*everyone, strict=True), strict=True):
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            unavailable[mechanism.name] = reason
    return [mechanism for mechanism in mechanisms if mechanism.name not in unavailable]


def memory_of(mechanism: Mechanism) -> Memory:
    """Return the kind of memory that a mechanism's buffers need; mechanisms share all kinds but NCCL windows."""
    if mechanism.windows is not None:
        return "windows"
    return "symmetric" if mechanism.base == "zero_sm" else "plain"


@contextmanager
def open_mechanism(
    session: Session, mechanism: Mechanism, collective: str, numel: int, stock: Lanes, shared: dict[Memory, Buffers]
) -> Iterator[Opened]:
    """Yield a mechanism with process group, buffers and `Lanes`, to use inside the context; all ranks enter together.

    `stock` has the streams and the computation of the pair, and its `comm` is replaced. Mechanisms share the buffers in
    `shared`, by kind of memory; missing ones are added.

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
        empty: Callable[[int], torch.Tensor] = partial(torch.empty, dtype=session.dtype, device=session.device)
        if windows is not None:
            empty = partial(windows.empty, dtype=session.dtype, device=session.device, group=group)
        elif communicator is not None:  # peers write into it: without it every call would copy its output
            empty = partial(communicator.empty, dtype=session.dtype)
        return allocate(
            collective, numel=numel, dtype=session.dtype, rank=session.rank, world_size=session.world_size, seed=1,
            empty=empty,
        )  # fmt: skip

    memory = memory_of(mechanism)
    if memory != "windows" and memory not in shared:
        shared[memory] = make()
    buffers = make() if memory == "windows" else shared[memory]
    comm = Comm(buffers=buffers, group=group, communicator=communicator)
    with ExitStack() as stack:
        if windows is not None:
            stack.push(partial(_release, windows))
        base = replace(stock, comm=comm.launch)
        lanes = stack.enter_context(applied(mechanism.controls, base))
        alone = replace(base, comm_stream=lanes.comm_stream)
        yield Opened(mechanism=mechanism, comm=comm, lanes=lanes, alone=alone)


def _release(windows: NcclWindows, kind: type[BaseException] | None, *_: object) -> None:
    """Release NCCL windows, unless an unexpected error ended the context: then the GPU may wait for ranks forever."""
    if kind is None or issubclass(kind, Unsupported):
        windows.release()


@contextmanager
def open_all(
    session: Session,
    mechanisms: Sequence[Mechanism],
    collective: str,
    numel: int,
    stock: Lanes,
    unavailable: dict[str, str],
) -> Iterator[tuple[list[Opened], Opened]]:
    """Yield every mechanism that can run, opened, its data checked, and one without controls to compare them with.

    All ranks enter together; `unavailable` gets why others cannot run.

    Raises:
        Unsupported: none can run here.
    """
    shared: dict[Memory, Buffers] = {}
    opened: list[Opened] = []
    with ExitStack() as stack:

        def enter(mechanism: Mechanism) -> Opened:
            with ExitStack() as own:  # left at once if another rank could not enter
                context = open_mechanism(session, mechanism, collective, numel, stock, shared)
                entered = session.raise_together(lambda: own.enter_context(context))
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
            session.raise_together(comm.check)
        without = next((each for each in opened if not each.mechanism.controls), None)
        if without is None:
            without = enter(Mechanism(name=BASES[session.device.type][0], controls=()))
        yield opened, without


class Caller(Protocol):
    """Runs calls by one mechanism, and reports the path (such as `torch`) that carried out each kind of call."""

    def report(self) -> Report:
        """Return, per kind of call, the path that carried out the call, and why."""

    def close(self) -> None:
        """Close the communicator; all ranks call it together."""


C = TypeVar("C", bound=Caller)


@dataclass(frozen=True, kw_only=True)
class Checked(Generic[C]):
    """Holds a mechanism whose first result was checked, so that it can be timed."""

    name: str
    caller: C
    wrong: str | None  # why its first result is wrong; None if it is right

    def path(self, session: Session) -> tuple[str, str]:
        """Return the paths that carried out calls on all ranks so far, and why; all ranks call this together."""
        found = session.gather({str(row.path): row.why for row in self.caller.report().calls})
        ways = {path: why for rank in found for path, why in rank.items()}
        return " and ".join(ways), "; ".join(dict.fromkeys(ways.values()))

    def marked(self, path: str, why: str) -> str | None:
        """Return why to distrust the mechanism's rows: a wrong first result, or another path than asked; else None."""
        went = f"ran as {path}: {why}" if self.name in FORCED and path != self.name else None
        return joined(self.wrong, went)


def open_checked(
    session: Session,
    names: Sequence[str],
    open_caller: Callable[[str], C],
    first: Callable[[C], Tensor],
    errors: Callable[[Tensor], tuple[float, float]],
    unavailable: dict[str, str],
    *,
    allowed: str,
) -> list[Checked[C]]:
    """Return the mechanisms that can run, opened, each with its first result checked; all ranks call it together.

    `open_caller` returns the `Caller` of a mechanism, to be closed by the user of this function; `first` runs a call
    and returns its result; `errors` returns a result's relative error on this rank and the allowed error (twice the
    error that `allowed` names). `unavailable` gets the reason of each mechanism that cannot run.
    """
    checked: list[Checked[C]] = []
    for name in names:
        try:
            caller = session.raise_together(partial(open_caller, name))
            result = session.raise_together(partial(first, caller))
        except Unsupported as error:
            unavailable[name] = str(error)
            continue
        wrong = next(
            (
                f"wrong on rank {rank}: relative error {found:.2e}, and {most:.2e}, twice {allowed}, is allowed"
                for rank, (found, most) in enumerate(session.gather(errors(result)))
                if not found <= most
            ),
            None,
        )
        checked.append(Checked(name=name, caller=caller, wrong=wrong))
    return checked
