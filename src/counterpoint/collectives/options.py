"""Define the options of a communicator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterpoint.collectives.program.calls import ALIGNMENT
from counterpoint.collectives.program.messages import SLOTS
from counterpoint.collectives.program.steps import Tuning
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """Holds the options of a `Communicator`; all but `timeout_s`, `graphs` and `sum_sms` must be equal on all ranks.

    Args:
        channels: how many calls can run at the same time; a call runs on the channel that its `channel=` names.
        timeout_s: seconds that a rank waits for another before it gives up.
        debug: compare the calls of all ranks before each starts (a round trip), not only when one waits or has ended.
        max_bytes: most symmetric memory of this rank; None: an eighth of the host's memory, on a GPU no limit.
        chunk_bytes: smallest piece in which blocks are sent and reduced, a multiple of 16; large blocks are sent in
            larger pieces. None: what is best for the device.
        staging_bytes: most staging that a channel keeps for reduce_scatters; a larger one runs in up to 1024 slices.
            None: as much as the largest reduce_scatter needs, (n - 1) / n of its input.
        mailbox_bytes: on GPUs, room for messages from each other rank, made at once; `send` and `recv` go through it,
            so that sends need no SM and may come before their `recv`. A multiple of 64; None: no such room.
        reserve_bytes: size of the first region of `empty`, which is then allocated at once; None: when first needed.
        graphs: on GPUs, replay a repeated call from a CUDA graph; None: yes.
        sum_sms: on GPUs, most SMs that the sum kernel of a reduction runs on, with one large block each, so that it
            takes no more from a concurrent GEMM; None: no limit, faster if a GEMM leaves SMs free (`GemmSmLimit`).
        share_gpu: on GPUs, let several ranks use one GPU: values and order are right, times are not; None: only where
            `counterpoint rehearse` runs the script.
        profile: measured figures of this machine, or their file; None: the file that the variable COUNTERPOINT_PROFILE
            names, else the figures shipped for this GPU, else H200's. `repr` of the communicator says which
            are assumed.

    Raises:
        Misconfigured: an option is out of range.
    """

    channels: int = 2
    timeout_s: float = 600.0
    debug: bool = False
    max_bytes: int | None = None
    chunk_bytes: int | None = None
    staging_bytes: int | None = None
    mailbox_bytes: int | None = None
    reserve_bytes: int | None = None
    graphs: bool | None = None
    sum_sms: int | None = None
    share_gpu: bool | None = None
    profile: Profile | str | Path | None = None

    def __post_init__(self) -> None:
        if self.channels < 1 or not self.timeout_s > 0:
            raise Misconfigured(
                f"channels={self.channels}, timeout_s={self.timeout_s}: give one channel or more, and a time above 0"
            )
        for name, value in (("reserve_bytes", self.reserve_bytes), ("sum_sms", self.sum_sms)):
            if value is not None and value < 1:
                raise Misconfigured(f"{name}={value}: give 1 or more, or None")
        if self.mailbox_bytes is not None and (self.mailbox_bytes < 1 or self.mailbox_bytes % (SLOTS * ALIGNMENT)):
            raise Misconfigured(
                f"mailbox_bytes={self.mailbox_bytes}: give a positive multiple of {SLOTS * ALIGNMENT}, or None"
            )
        Tuning(chunk_bytes=self.chunk_bytes, staging_bytes=self.staging_bytes)  # raises if it cannot be one

    def shared(self, *, on_gpu: bool, profile: Profile) -> dict[str, object]:
        """Return the options that must be equal on all ranks: they shape programs, and on GPUs memory regions."""
        same: dict[str, object] = {
            "channels": self.channels,
            "chunk_bytes": self.chunk_bytes,
            "staging_bytes": self.staging_bytes,
            "debug": self.debug,
            "profile": profile.digest,
        }
        if on_gpu:
            same |= {"max_bytes": self.max_bytes, "reserve_bytes": self.reserve_bytes}
            same |= {"mailbox_bytes": self.mailbox_bytes, "share_gpu": self.share_gpu}
        return same
