"""Open what runs calls that depend on communication, and compare its first result with float64 before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from counterpoint.errors import Unsupported
from counterpoint.measurement.rows import joined
from counterpoint.measurement.session import Session
from counterpoint.parallel.report import Report

if TYPE_CHECKING:
    from torch import Tensor

FORCED = ("serial", "cuts", "flagged", "gather", "slabs")  # mechanisms that a call may be unable to take


class Caller(Protocol):
    """Runs calls by one mechanism, and says which way they went."""

    def report(self) -> Report:
        """Return which calls went which way, and why."""

    def close(self) -> None:
        """Leave the communicator; all ranks call it."""


C = TypeVar("C", bound=Caller)


@dataclass(frozen=True, kw_only=True)
class Checked(Generic[C]):
    """Holds a mechanism that is ready to be timed."""

    name: str
    caller: C
    wrong: str | None  # why its first result is wrong

    def path(self, session: Session) -> tuple[str, str]:
        """Return which ways all calls went so far, on all ranks, and why. All ranks call it."""
        found = session.gather({str(row.path): row.why for row in self.caller.report().calls})
        ways = {path: why for rank in found for path, why in rank.items()}
        return " and ".join(ways), "; ".join(dict.fromkeys(ways.values()))

    def marked(self, path: str, why: str) -> str | None:
        """Return why its rows must not be believed, if its calls went that way for that reason."""
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
    """Open each mechanism that can run here, and check its first result. All ranks call it together.

    Args:
        session: this rank.
        names: the mechanisms.
        open_caller: returns what runs calls by a mechanism; the caller of this function closes it.
        first: runs a call, and returns its result.
        errors: the relative error of a result on this rank, and the error that is allowed.
        unavailable: gets the reason of each mechanism that cannot run.
        allowed: in words, twice which error is allowed.

    Returns:
        The mechanisms that ran, with what was wrong on any rank.
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
