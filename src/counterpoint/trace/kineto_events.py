"""Decode one event of a Kineto file: what any account needs of it, and what kind of event it is."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import msgspec

from counterpoint.trace.timeline import HostKind

__all__ = ["IGNORED", "ON_GPU", "Categories", "EventArgs", "EventStart", "KinetoEvent"]

ON_GPU, IGNORED = -1, -2
_GPU = {"kernel", "concurrent_kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset"}
_HOST = {
    "cpu_op": HostKind.OP,
    "operator": HostKind.OP,
    "cuda_runtime": HostKind.RUNTIME,
    "cuda_driver": HostKind.RUNTIME,
    "hip_runtime": HostKind.RUNTIME,
    "runtime": HostKind.RUNTIME,
    "driver": HostKind.RUNTIME,
    "overhead": HostKind.RUNTIME,
    "user_annotation": HostKind.ANNOTATION,
    "python_function": HostKind.PYTHON,
    "cuda_sync": HostKind.SYNC,
}
_RAW = msgspec.Raw(b"")

Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # what a column of 64 bits holds
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class EventArgs(msgspec.Struct, gc=False):
    """Holds the arguments of an event that any account needs; the decoder skips all others."""

    external: Int | None = msgspec.field(default=None, name="External id")
    old_external: Int | None = msgspec.field(default=None, name="external id")
    correlation: Int | None = None
    device: Int32 | None = None
    in_device: Int32 | None = msgspec.field(default=None, name="inDevice")  # peer copies: who carried it out
    stream: Int | None = None
    grid: msgspec.Raw = _RAW
    block: msgspec.Raw = _RAW
    regs: Int32 | None = msgspec.field(default=None, name="registers per thread")
    smem: Int | None = msgspec.field(default=None, name="shared memory")
    bytes: Int | None = None
    dims: msgspec.Raw = msgspec.field(default=_RAW, name="Input Dims")
    waits_for: Int | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    waits_on: Int | None = msgspec.field(default=None, name="wait_on_stream")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_nelems: Int | None = msgspec.field(default=None, name="In msg nelems")
    out_nelems: Int | None = msgspec.field(default=None, name="Out msg nelems")
    group_size: Int | None = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    group_desc: str | None = msgspec.field(default=None, name="Process Group Description")
    group_ranks: msgspec.Raw = msgspec.field(default=_RAW, name="Process Group Ranks")
    seq: Int | None = msgspec.field(default=None, name="Seq")
    comms_id: msgspec.Raw = msgspec.field(default=_RAW, name="Comms Id")
    comm_rank: Int | None = msgspec.field(default=None, name="Rank")
    src_rank: Int | None = msgspec.field(default=None, name="Src Rank")
    dst_rank: Int | None = msgspec.field(default=None, name="Dst Rank")


class KinetoEvent(msgspec.Struct, gc=False):
    """Holds one trace event; only complete events (`ph` X) carry time."""

    ph: str = ""
    cat: str | None = ""
    name: str | None = ""
    pid: Any = 0
    tid: Any = 0
    ts: float | None = None
    dur: float | None = None
    args: EventArgs | None = None


class EventStart(msgspec.Struct, gc=False):
    """Holds an event's start to the last digit of the file."""

    ph: str = ""
    ts: Decimal | None = None


class Categories(dict[str | None, int]):
    """Maps a category as the file spells it to its HostKind, or to ON_GPU or IGNORED."""

    def __missing__(self, category: str | None) -> int:
        name = (category or "").lower()
        self[category] = kind = ON_GPU if name in _GPU else _HOST.get(name, IGNORED)
        return kind
