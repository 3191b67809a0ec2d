"""What a communicator can be asked for, in one place: `Communicator` takes these by keyword, `overlap` as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from counterpoint.collectives.program.steps import Tuning
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """Options of a communicator; all of them but `timeout_s`, `graphs` and `sum_sms` are the same on all ranks.

    Args:
        channels: how many calls can run at the same time; `channel=` of a call says which one runs it.
        timeout_s: seconds that a rank waits for another before it gives up.
        debug: compare the calls of all ranks before each starts (a round trip), not only when one waits or has ended.
        max_bytes: symmetric memory that this rank may take; None: an eighth of the machine's, on a GPU what it has.
        chunk_bytes: smallest piece in which blocks are sent and reduced, a multiple of 16; large blocks take larger.
            None: what is best for the device.
        staging_bytes: most staging that a channel keeps for reduce_scatters, which come in slices if they need more;
            at most 1024 of them. None: as much as the largest needs, (n - 1) / n of its input.
        reserve_bytes: `empty` makes its first region at once, of this size.
        graphs: on GPUs, replay a call from a CUDA graph when it comes again; None: yes.
        sum_sms: on GPUs, SMs that the sums of reductions run on, one large block each, so that they take no more from a
            GEMM beside them; None: as many as are free, which is faster where a GEMM leaves some (`GemmSmLimit`).
        profile: what was measured on this machine, or a file of it; None: the file that the variable
            COUNTERPOINT_PROFILE names, else the shipped figures of this GPU, else those of H200. `repr` of the
            communicator says which are assumed.
        crossover_bytes: by operation, bytes of the full array below which `fallback` takes a call; None: as measured.

    Raises:
        Misconfigured: an option that cannot mean anything.
    """

    channels: int = 2
    timeout_s: float = 600.0
    debug: bool = False
    max_bytes: int | None = None
    chunk_bytes: int | None = None
    staging_bytes: int | None = None
    reserve_bytes: int | None = None
    graphs: bool | None = None
    sum_sms: int | None = None
    crossover_bytes: Mapping[str, int] | None = None
    profile: Profile | str | Path | None = None

    def __post_init__(self) -> None:
        if self.channels < 1 or not self.timeout_s > 0:
            raise Misconfigured(
                f"channels={self.channels}, timeout_s={self.timeout_s}: give one channel or more, and a time above 0"
            )
        for name, value in (("reserve_bytes", self.reserve_bytes), ("sum_sms", self.sum_sms)):
            if value is not None and value < 1:
                raise Misconfigured(f"{name}={value}: give 1 or more, or None")
        Tuning(chunk_bytes=self.chunk_bytes, staging_bytes=self.staging_bytes)  # raises if it cannot be one

    def shared(self, *, on_gpu: bool, crossover_bytes: Mapping[str, int], profile: Profile) -> dict[str, object]:
        """Return what has to be the same on all ranks: what programs depend on, and on GPUs what regions depend on."""
        same: dict[str, object] = {
            "channels": self.channels,
            "chunk_bytes": self.chunk_bytes,
            "staging_bytes": self.staging_bytes,
            "debug": self.debug,
            "profile": profile.digest,
        }
        if any(crossover_bytes.values()):
            same["crossover_bytes"] = dict(crossover_bytes)
        if on_gpu:
            same |= {"max_bytes": self.max_bytes, "reserve_bytes": self.reserve_bytes}
        return same


class OptionKeywords(TypedDict, total=False):
    """The fields of `CommunicatorOptions` as keywords of a call; a test holds both lists equal."""

    channels: int
    timeout_s: float
    debug: bool
    max_bytes: int | None
    chunk_bytes: int | None
    staging_bytes: int | None
    reserve_bytes: int | None
    graphs: bool | None
    sum_sms: int | None
    crossover_bytes: Mapping[str, int] | None
    profile: Profile | str | Path | None
