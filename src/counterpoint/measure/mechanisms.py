"""From a mechanism to something that can be launched: process group, buffers, streams with its controls applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from counterpoint.controls.control import Lanes
from counterpoint.errors import Unsupported
from counterpoint.measure.comm import Buffers, Comm, allocate, plain_memory
from counterpoint.measure.names import BASES, Mechanism
from counterpoint.measure.session import Session

__all__ = ["Opened", "OpenedAll", "open_all", "open_mechanism"]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A mechanism ready to run one collective.

    `lanes` have the controls applied; `alone` has those of the collective only, and the computation as it is.
    """

    mechanism: Mechanism
    comm: Comm
    lanes: Lanes
    alone: Lanes


@contextmanager
def open_mechanism(
    session: Session, mechanism: Mechanism, collective: str, numel: int, stock: Lanes, plain: dict[str, Buffers]
) -> Iterator[Opened]:
    """Process group, buffers and lanes of a mechanism, for as long as the context lasts. All ranks enter it together.

    Args:
        session: this rank.
        mechanism: what to open.
        collective: what it runs.
        numel: elements of the full array.
        stock: streams and computation of the pair; its `comm` is replaced.
        plain: buffers in plain memory by collective, shared by all mechanisms that need no others.

    Raises:
        Unsupported: the mechanism cannot run here.
    """
    reason = mechanism.why_unavailable(collective)
    if reason is not None:
        raise Unsupported(reason)
    group = session.group(mechanism.controls)
    windows = mechanism.windows

    def make() -> Buffers:
        empty = plain_memory if windows is None else partial(windows.empty, group=group)
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

    if windows is None and collective not in plain:
        plain[collective] = make()
    comm = Comm(buffers=plain[collective] if windows is None else make(), group=group)
    with ExitStack() as stack:
        if windows is not None:
            stack.callback(windows.release)
        base = replace(stock, comm=comm.launch)
        lanes = base
        for control in mechanism.controls:
            lanes = stack.enter_context(control.apply(lanes))
        alone = replace(base, comm_stream=lanes.comm_stream)
        yield Opened(mechanism=mechanism, comm=comm, lanes=lanes, alone=alone)


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
    plain: dict[str, Buffers] = {}
    unavailable: dict[str, str] = {}
    opened: list[Opened] = []
    with ExitStack() as stack:

        def enter(mechanism: Mechanism) -> Opened:
            context = open_mechanism(session, mechanism, collective, numel, stock, plain)
            return session.together(lambda: stack.enter_context(context))

        for mechanism in mechanisms:
            try:
                opened.append(enter(mechanism))
            except Unsupported as error:
                unavailable[mechanism.name] = str(error)
        if not opened:
            raise Unsupported(f"no mechanism can run {collective} here: {unavailable}")
        for comm in {id(each.comm.group): each.comm for each in opened}.values():
            session.together(comm.check)
        without = next((each for each in opened if not each.mechanism.controls), None)
        if without is None:
            without = enter(Mechanism(name=BASES[session.device.type][0], controls=()))
        yield OpenedAll(each=tuple(opened), plain=without, unavailable=unavailable)
