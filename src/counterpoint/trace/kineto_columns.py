"""Decode Kineto events and append their data to columns while a trace is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import numpy as np

from counterpoint.errors import BadTrace
from counterpoint.trace import classify
from counterpoint.trace.chunks import EventRuns
from counterpoint.trace.timeline import CollectiveInfo, HostKind, Intern

_ON_GPU, _IGNORED, _UNKNOWN = -1, -2, -3
_GPU = {"kernel", "concurrent_kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "mtia_ccp_events"}
_HOST = {
    "cpu_op": HostKind.OP,
    "operator": HostKind.OP,
    "runtime": HostKind.RUNTIME,
    "driver": HostKind.RUNTIME,
    "overhead": HostKind.RUNTIME,
    "user_annotation": HostKind.ANNOTATION,
    "python_function": HostKind.PYTHON,
    "cuda_sync": HostKind.SYNC,
}
_CALLS = ("_runtime", "_driver")  # of CUDA, HIP, XPU, MTIA, HPU, ...
_OF_OLD = {"CPU functions": int(HostKind.OP), "CUDA functions": _ON_GPU}  # processes of torch.autograd.profiler
_REPEATED = {"gpu_user_annotation", "collective_comm", "cuda_event", "trace", ""}  # repeat other events
_DIMS = 8  # most dimensions of a tensor
_RAW = msgspec.Raw(b"")
PARAM_COMMS = "record_param_comms"
_C10D, _GLOO = "c10d::", "gloo:"
_LAST_US = 9.2e15  # the year 2261, the most that 63 bits of ns hold
_EXACT_US = 1 << 43  # a float64 of fewer µs is exact to the ns

Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # integers that fit an int64 column
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class EventArgs(msgspec.Struct, gc=False):
    """Holds the arguments of an event that the reader needs; the decoder skips all others."""

    external: Int | None = msgspec.field(default=None, name="External id")
    old_external: Int | None = msgspec.field(default=None, name="external id")
    correlation: Int | None = None
    device: Int32 | None = None
    in_device: Int32 | None = msgspec.field(default=None, name="inDevice")  # of peer copies: the executing device
    stream: Int | None = None
    grid: msgspec.Raw = _RAW
    block: msgspec.Raw = _RAW
    regs: Int32 | None = msgspec.field(default=None, name="registers per thread")
    smem: Int | None = msgspec.field(default=None, name="shared memory")
    bytes: Int | None = None
    process: Any = msgspec.field(default=None, name="name")  # of metadata events, such as `process_name`
    dims: msgspec.Raw = msgspec.field(default=_RAW, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_RAW, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=_RAW, name="Concrete Inputs")
    sequence: Int | None = msgspec.field(default=None, name="Sequence number")
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


class _EventFields(msgspec.Struct, gc=False):
    """Holds the fields of a trace event except its arguments; only complete events (`ph` is X) have a duration."""

    ph: str = ""
    cat: str | None = ""
    name: str | None = ""
    pid: Any = 0
    tid: Any = 0
    ts: float | None = None
    dur: float | None = None


class KinetoEvent(_EventFields, gc=False):
    """Holds one trace event with the arguments that the reader needs."""

    args: EventArgs | None = None


class LooseEvent(_EventFields, gc=False):
    """Holds an event with undecoded arguments, so that one malformed argument does not lose the event."""

    args: msgspec.Raw = _RAW


class EventStart(msgspec.Struct, gc=False):
    """Holds an event's start as an exact decimal, since float64 would round it."""

    ph: str = ""
    ts: Decimal | None = None


class Categories(dict[str | None, int]):
    """Maps an event's category, as spelled in the file, to its HostKind, or to _ON_GPU, _IGNORED or _UNKNOWN."""

    def __missing__(self, category: str | None) -> int:
        name = (category or "").lower()
        if name in _GPU:
            kind = _ON_GPU
        elif name.endswith(_CALLS):
            kind = int(HostKind.RUNTIME)
        else:
            kind = int(_HOST.get(name, _IGNORED if name in _REPEATED else _UNKNOWN))
        self[category] = kind
        return kind


_NO_ARGS = EventArgs()
_LOOSE_EVENTS = msgspec.json.Decoder(list[LooseEvent], strict=False)
_ARGS: msgspec.json.Decoder[EventArgs | None] = msgspec.json.Decoder(EventArgs | None, strict=False)
_LOOSE_ARGS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARG_DECODERS = {
    field.encode_name: (field.name, msgspec.json.Decoder(field.type, strict=False))
    for field in msgspec.structs.fields(EventArgs)
}
_HEXADECIMAL = re.compile(rb'"\s*0[xX]([0-9a-fA-F]{1,15})\s*"')
_WHOLE = re.compile(rb'"?(-?\d{1,18})\.0*"?')


class EventNames(Intern[str]):
    """Numbers the names of events, and lists those of convolutions, attention and collectives: more is read of them.

    A trace has few names and many events, so each name is looked at once.
    """

    def __init__(self) -> None:
        self.valued: list[int] = []  # numbers of names of operations whose work depends on numbers among their inputs
        self.calls: list[int] = []  # numbers of names of collectives of c10d or gloo

    def __missing__(self, name: str) -> int:
        number = super().__missing__(name)
        if classify.has_valued_inputs(name):
            self.valued.append(number)
        elif name.startswith((PARAM_COMMS, _C10D, _GLOO)):
            self.calls.append(number)
        return number

    def rows(self, name: Any, wanted: list[int]) -> list[int]:
        """Return the indices of elements of `name` (numbers of names) that occur in `wanted`."""
        if not wanted:
            return []
        chosen = np.zeros(len(self), bool)
        chosen[wanted] = True
        found: list[int] = np.flatnonzero(chosen[name]).tolist()
        return found


@dataclass
class Columns:
    """Holds the events read so far: a list of arrays per column, and tables of names and shapes that columns index."""

    categories: Categories = field(default_factory=Categories)
    names: EventNames = field(default_factory=EventNames)
    # shapes, dtypes and values of an operation's inputs; 0: none
    inputs: Intern[tuple[bytes, bytes, bytes]] = field(default_factory=lambda: Intern({(b"", b"", b""): 0}))
    grids: Intern[bytes] = field(default_factory=Intern)
    threads: Intern[tuple[Any, ...]] = field(default_factory=Intern)
    lanes: Intern[tuple[Any, ...]] = field(default_factory=Intern)  # (pid, tid) of GPU operations
    gpu: dict[str, list[Any]] = field(default_factory=dict)
    host: dict[str, list[Any]] = field(default_factory=dict)
    streamed: dict[str, list[Any]] = field(default_factory=dict)  # as `gpu`: unknown categories with a stream
    unknown: Counter[str] = field(default_factory=Counter)  # number of events of `streamed`, by category
    left_out: Counter[str] = field(default_factory=Counter)  # of other events of unknown category, by category
    processes: dict[str, str] = field(default_factory=dict)  # names of processes, by pid
    bare: Counter[str] = field(default_factory=Counter)  # number of events without a category that are left out, by pid
    infos: list[CollectiveInfo] = field(default_factory=list)
    count: int = 0
    base_us: int | None = None  # origin of `start`: the first event's start in whole µs
    inexact: bool = False  # whether starts have more digits than a float64 holds
    comm_rank: int | None = None
    odd: Counter[str] = field(default_factory=Counter)  # number of arguments of a wrong type, by argument

    def decode_loosely(self, run: bytes) -> list[KinetoEvent]:
        """Return the events in the bytes `run`; drop arguments of a wrong type and count them in `odd`."""
        odd: Counter[str] = Counter()
        events = [
            KinetoEvent(e.ph, e.cat, e.name, e.pid, e.tid, e.ts, e.dur, _args_of(e.args, odd) if e.args else None)
            for e in _LOOSE_EVENTS.decode(run)
        ]
        self.odd += odd
        return events

    def info_of(self, args: EventArgs) -> int:
        """Append a collective's metadata to `infos`, and return the index of the new entry."""
        self.infos.append(
            CollectiveInfo(
                op=classify.normal_op(args.collective or ""),
                group=args.group,
                group_desc=args.group_desc or None,
                group_ranks=_text(args.group_ranks),
                group_size=args.group_size,
                seq=args.seq,
                comms_id=_text(args.comms_id),
                in_nelems=args.in_nelems,
                out_nelems=args.out_nelems,
                dtype=args.dtype,
            )
        )
        if self.comm_rank is None and args.comm_rank is not None and (args.group_desc or "default_pg") == "default_pg":
            self.comm_rank = args.comm_rank
        return len(self.infos) - 1


def _args_of(raw: msgspec.Raw, odd: Counter[str]) -> EventArgs | None:
    """Return an event's arguments, except arguments of a wrong type; `"0x0"` and `7.0` count as integers."""
    try:
        return _ARGS.decode(raw)
    except msgspec.ValidationError:
        pass
    try:
        stated = _LOOSE_ARGS.decode(raw)
    except msgspec.ValidationError:  # args is not a JSON object
        odd["args"] += 1
        return None
    values: dict[str, Any] = {}
    for key, value in stated.items():
        if key in _ARG_DECODERS:
            name, decoder = _ARG_DECODERS[key]
            for text in (value, _number(bytes(value))):
                try:
                    values[name] = decoder.decode(text)
                    break
                except msgspec.ValidationError:
                    continue
            else:
                odd[key] += 1
    return EventArgs(**values)


def _number(text: bytes) -> bytes:
    """Return the JSON text of an integer for `"0x7"`, `"7"` or `7.0`; other JSON text unchanged."""
    if found := _HEXADECIMAL.fullmatch(text):
        return b"%d" % int(found.group(1), 16)
    if found := _WHOLE.fullmatch(text):
        return found.group(1)
    return text


def absorb(columns: Columns, runs: EventRuns[KinetoEvent], run: bytes, events: list[KinetoEvent]) -> None:
    """Append the decoded `events` to the columns; raise `BadTrace` with the byte offset for an impossible time."""
    columns.count += len(events)
    timed = [e for e in events if e.ph == "X"]
    if len(timed) < len(events):
        named = (e for e in events if e.ph == "M" and e.name == "process_name")
        columns.processes.update({_label(e.pid): _label(e.args.process) for e in named if e.args})
    if not timed:
        return
    ts = np.array([e.ts for e in timed], np.float64)
    dur = np.array([e.dur or 0.0 for e in timed], np.float64)
    wrong = ~((ts >= 0) & (ts < _LAST_US) & (dur >= 0) & (dur < _LAST_US))  # True for NaN, too
    if wrong.any():
        event = timed[int(np.argmax(wrong))]
        at = runs.offset_of(run, next(i for i, e in enumerate(events) if e is event))
        raise BadTrace(
            f"an event with an impossible time (ts {event.ts}, dur {event.dur}); times are µs from 0 to {_LAST_US:.1e}",
            path=runs._label,
            offset=at,
        )
    if columns.base_us is None:
        columns.base_us = int(ts[0])
    if ts.max() >= _EXACT_US and (ts % 1).any():
        columns.inexact = True
    ts = _exact_starts(run, columns.base_us) if columns.inexact else ts - columns.base_us
    kinds = columns.categories
    kind = np.array([kinds[e.cat] for e in timed], np.int8)
    if not kinds.keys().isdisjoint(("", None)):
        _read_bare(columns, timed, kind)
    others = np.flatnonzero(kind == _UNKNOWN).tolist()
    unknown = [i for i in others if (a := timed[i].args) and a.stream is not None]
    columns.unknown.update(str(timed[i].cat)[:40] for i in unknown)
    columns.left_out.update(str(timed[i].cat)[:40] for i in set(others).difference(unknown))
    for rows, absorbed, into in (
        (np.flatnonzero(kind == _ON_GPU), _absorb_gpu, columns.gpu),
        (np.flatnonzero(kind >= 0), _absorb_host, columns.host),
        (np.array(unknown, np.int64), _absorb_gpu, columns.streamed),
    ):
        if len(rows) == len(timed):
            absorbed(columns, into, timed, ts, dur, kind)
        elif len(rows):
            absorbed(columns, into, [timed[i] for i in rows.tolist()], ts[rows], dur[rows], kind[rows])


def _read_bare(columns: Columns, events: list[KinetoEvent], kind: Any) -> None:
    """Set the kinds of events without a category by their process, as torch.autograd.profiler did; count the rest."""
    for i in np.flatnonzero(kind == _IGNORED).tolist():
        if not events[i].cat:
            pid = _label(events[i].pid)
            kind[i] = _OF_OLD.get(pid, _IGNORED)
            if kind[i] == _IGNORED:
                columns.bare[pid] += 1


def _label(value: Any) -> str:
    """Return a pid or a process's name, which may be any JSON value, as a short text for messages."""
    return str(value)[:80]


def _exact_starts(run: bytes, base_us: int) -> Any:
    """Return the starts of complete events minus `base_us` in µs, exact to the ns even if the file counts from 1970."""
    instants = msgspec.json.decode(b"[" + run + b"]", type=list[EventStart], strict=False)
    return np.array([float((i.ts or 0) - base_us) for i in instants if i.ph == "X"], np.float64)


def _absorb_gpu(
    columns: Columns, into: dict[str, list[Any]], events: list[KinetoEvent], ts: Any, dur: Any, kind: Any
) -> None:
    args = [e.args or _NO_ARGS for e in events]
    grids, names = columns.grids, columns.names
    _put(
        into,
        start=ts,
        dur=dur,
        name=np.array([names[e.name or ""] for e in events], np.int32),
        device=np.array([_first(a.device, a.in_device) for a in args], np.int32),
        stream=np.array(
            [a.stream if a.stream is not None else _stream_of(e.tid) for a, e in zip(args, events, strict=True)],
            np.int64,
        ),
        correlation=np.array([-1 if a.correlation is None else a.correlation for a in args], np.int64),
        lane=_threads(columns.lanes, events),
        external=_externals(args),
        grid=np.array([grids[bytes(a.grid)] for a in args], np.int32),
        block=np.array([grids[bytes(a.block)] for a in args], np.int32),
        regs=np.array([a.regs or 0 for a in args], np.int32),
        smem=np.array([a.smem or 0 for a in args], np.int64),
        bytes=np.array([-1 if a.bytes is None else a.bytes for a in args], np.int64),
        info=np.array([-1 if a.collective is None else columns.info_of(a) for a in args], np.int32),
    )


def _absorb_host(
    columns: Columns, into: dict[str, list[Any]], events: list[KinetoEvent], ts: Any, dur: Any, kind: Any
) -> None:
    names, inputs = columns.names, columns.inputs
    external, correlation, stream, waits_for, waits_on, sequence = (
        np.full(len(events), -1, np.int64) for _ in range(6)
    )
    given = np.full(len(events), -1, np.int32)
    rows = np.flatnonzero(kind == HostKind.OP)
    ops = [events[i].args or _NO_ARGS for i in rows.tolist()]
    external[rows] = _externals(ops)
    sequence[rows] = [-1 if a.sequence is None else a.sequence for a in ops]
    name = np.array([names[e.name or ""] for e in events], np.int32)
    values = {i: bytes(ops[i].concrete) for i in names.rows(name[rows], names.valued)}
    given[rows] = [inputs[bytes(a.dims), bytes(a.types), values.get(i, b"")] for i, a in enumerate(ops)]
    rows = np.flatnonzero((kind == HostKind.RUNTIME) | (kind == HostKind.SYNC))
    calls = [events[i].args or _NO_ARGS for i in rows.tolist()]
    correlation[rows] = [-1 if a.correlation is None else a.correlation for a in calls]
    for i in np.flatnonzero(kind == HostKind.SYNC).tolist():
        a = events[i].args or _NO_ARGS
        stream[i], waits_for[i], waits_on[i] = _first(a.stream), _first(a.waits_for), _first(a.waits_on)
    _put(
        into,
        start=ts,
        dur=dur,
        kind=kind.astype(np.uint8),
        name=name,
        thread=_threads(columns.threads, events),
        correlation=correlation,
        external=external,
        stream=stream,
        waits_for=waits_for,
        waits_on=waits_on,
        sequence=sequence,
        info=_described_calls(columns, events, name),
        inputs=given,
    )


def _described_calls(columns: Columns, events: list[KinetoEvent], name: Any) -> Any:
    """Return the index in `infos` of the collective that each event calls; -1: the event calls none.

    c10d describes collectives in `record_param_comms`. Where the backend records no such event, as with gloo, the
    inputs of the operation (`c10d::_allgather_base_`) tell all but the dtype of lists of tensors, which
    `gloo:all_gather` has.
    """
    infos = np.full(len(events), -1, np.int32)
    for row in columns.names.rows(name, columns.names.calls):
        args = events[row].args
        if args is None:
            continue
        if args.collective is not None:
            infos[row] = columns.info_of(args)
        elif (info := _info_of_inputs(events[row].name or "", args)) is not None:
            columns.infos.append(info)
            infos[row] = len(columns.infos) - 1
    return infos


def _info_of_inputs(name: str, args: EventArgs) -> CollectiveInfo | None:
    """Return a collective's metadata, derived from the inputs of its c10d operation (output first); None if unknown."""
    op = classify.host_collective(name)
    try:
        shapes = msgspec.json.decode(args.dims, type=list[Any])
        types = msgspec.json.decode(args.types, type=list[Any]) if args.types else []
    except msgspec.DecodeError:
        return None
    if op is None or not shapes or not types:
        return None
    dtype = types[0] if isinstance(types[0], str) else None
    if name.startswith(_GLOO):
        return CollectiveInfo(dtype=dtype)
    out = _numel(shapes[0])
    return CollectiveInfo(
        op=op,
        out_nelems=out,
        in_nelems=(_numel(shapes[1]) or out) if len(shapes) > 1 else out,
        dtype=dtype,
    )


def _numel(shape: Any) -> int | None:
    """Return the number of elements of a shape or a list of shapes; None for any other value."""
    if not isinstance(shape, list) or not shape:
        return None
    tensors = shape if isinstance(shape[0], list) else [shape]
    if not all(isinstance(one, list) and len(one) <= _DIMS and all(map(_is_length, one)) for one in tensors):
        return None
    return sum(map(math.prod, tensors))


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _threads(threads: Intern[tuple[Any, ...]], events: list[KinetoEvent]) -> Any:
    """Return, per event, the index of (pid, tid) in the table `threads`; pid and tid may be any JSON values."""
    pids, tids = [e.pid for e in events], [e.tid for e in events]
    try:
        if pids.count(pids[0]) == len(pids):  # one process, as in most traces: a faster way to the same numbers
            number = {tid: threads[pids[0], tid] for tid in set(tids)}
            return np.array([number[tid] for tid in tids], np.int32)
        return np.array([threads[key] for key in zip(pids, tids, strict=True)], np.int32)
    except TypeError:  # JSON lists and objects cannot be keys of a dictionary
        keys = [tuple(v if isinstance(v, Hashable) else str(v) for v in (e.pid, e.tid)) for e in events]
        return np.array([threads[key] for key in keys], np.int32)


def _externals(args: list[EventArgs]) -> Any:
    return np.array([a.external if a.external is not None else _first(a.old_external) for a in args], np.int64)


def _first(*values: int | None) -> int:
    """Return the first value that is not None; -1 if all values are None."""
    for value in values:
        if value is not None:
            return value
    return -1


def _put(table: dict[str, list[Any]], **columns: Any) -> None:
    for name, values in columns.items():
        table.setdefault(name, []).append(values)


def _stream_of(tid: Any) -> int:
    """Return the stream number in a tid such as 7 or "stream 7" (traces before 2022)."""
    digits = "".join(c for c in str(tid) if c in "0123456789")
    return int(digits[:9]) if digits else 0


def _text(raw: msgspec.Raw) -> str | None:
    """Return the JSON text `raw` without quotes: a value that versions write as string, list or number; None: empty."""
    text = bytes(raw).decode("utf-8", "replace").strip().strip('"')
    return text if text and text != "null" else None
