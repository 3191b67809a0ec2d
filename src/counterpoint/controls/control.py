"""What every knob is: something that says why it cannot work, acts on one pair, and proves that it took effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from counterpoint.errors import NoEffect
from counterpoint.records.evidence import Evidence, Seen

__all__ = ["Control", "Lanes", "require"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Where the two sides of a pair run. A control returns a copy with a stream or a launch replaced.

    `compute` and `comm` queue one trial of their side on the current stream and return at once.
    """

    compute_stream: Any  # torch.cuda.Stream
    comm_stream: Any
    compute: Callable[[], None]
    comm: Callable[[], None]


class Control(ABC):
    """One knob with its setting. Subclasses are frozen keyword-only dataclasses, one file each."""

    remedy: ClassVar[str]
    """What to do where it did nothing, for the text of `NoEffect`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As in a mechanism's name: `gemm_sms=108`."""

    @abstractmethod
    def available(self) -> str | None:
        """Why it cannot work with this machine, torch or NCCL; None if it can. Never raises."""

    @abstractmethod
    def verify(self, seen: Seen) -> Evidence:
        """Whether it took effect, told from what ran and never from what was asked."""

    def configure(self, options: Any) -> None:  # noqa: B027  most controls do not
        """Set fields of `torch.distributed.ProcessGroupNCCL.Options` before the process group is made."""

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """The lanes with this control on; on exit everything is as it was."""
        yield lanes


def require(evidence: Evidence, *, fix: str) -> Evidence:
    """`evidence` if the control took effect.

    Raises:
        NoEffect: it did not.
    """
    if not evidence.took_effect:
        raise NoEffect(evidence.control, asked=evidence.asked, seen=evidence.seen, fix=fix)
    return evidence
