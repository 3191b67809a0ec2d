"""Read the NVTX ranges of a Nsight Systems export: PyTorch's operations with shapes, and NCCL's own annotations.

PyTorch (`emit_nvtx`) writes `aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]], input_op_ids = [...]`: every call
has another text, so SQLite cuts out names and shapes, and only distinct ones become Python strings. NCCL (>= 2.20)
opens a range per call on the calling thread and, if the report was exported with `--include-blobs=true`, states the
communicator and the message size in a binary payload.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from counterpoint.trace.classify import normal_op
from counterpoint.trace.nsys_tables import MAX_TEXT, OPEN_END, Export, NcclCommunicator, look_up, text_or_unknown
from counterpoint.trace.timeline import I32, I64, U8, CollectiveInfo, HostKind, Intern

_TABLE = "NVTX_EVENTS"
_PUSH_POP = (59, 70)
_START_END = (60, 71)
_OP = re.compile(r"[a-z_]\w*::")  # a dispatcher namespace; `FSDP::pre_forward (...)` is an annotation
_NCCL = re.compile(r"nccl([A-Z]\w*?)(?:_impl)?(?:\(.*)?$")
_SIZE, _ID, _RANKS, _RANK, _DEVICE = (
    "Message size [bytes]", "NCCL communicator ID", "No. of ranks", "Rank", "CUDA device",
)  # fmt: skip
_FORMATS = {5: "<i", 6: "<I", 9: "<q", 10: "<Q", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q"}  # NVTX entry types
_MAX_BYTES, _MAX_RANKS = 1 << 42, 1 << 20  # of a message and of a communicator; larger values are damage
_HEADER = struct.Struct("<IIIIQQ")  # domain, -, schema, -, payload bytes, total bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class NvtxRanges:
    """Holds NVTX ranges that were opened and closed, in file order; times in ns."""

    start: I64
    end: I64
    thread: I64  # globalTid
    name: I32
    kind: U8  # HostKind
    shape: I32  # into the shapes; -1: not recorded
    nests: U8  # 1: push/pop range; those of one thread nest
    row: I64  # row of the NVTX table


@dataclass(slots=True)
class NcclCalls:
    """Holds the ranges in which NCCL launches kernels, each with the NCCL calls that it launches; times in ns."""

    thread: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    infos: list[list[CollectiveInfo]] = field(default_factory=list)
    communicators: list[NcclCommunicator] = field(default_factory=list)


def read_nvtx(export: Export, names: Intern[str], shapes: Intern[str]) -> NvtxRanges:
    """Return all NVTX ranges that were opened and closed; drop marks, domains and ranges left open."""
    columns = {"start": -1, "end": -1, "eventType": 59, "globalTid": 0, "textId": -1}
    data = export.ints(_TABLE, columns, open_ends=True)
    keep = np.isin(data["eventType"], _PUSH_POP + _START_END) & (data["end"] != OPEN_END)
    keep &= ~export.odd_times(_TABLE, data["start"], data["end"], keep)  # other rows, such as domains, have no times
    name, shape = _texts(export, data["textId"], names, shapes)
    is_op = np.array([bool(_OP.match(text)) for text in tuple(names)], bool)
    name = name[keep]
    ranges = {key: data[key][keep] for key in ("start", "end")}
    return NvtxRanges(
        **ranges,
        thread=data["globalTid"][keep],
        name=name,
        kind=np.where(is_op[name], HostKind.OP, HostKind.ANNOTATION).astype(np.uint8),
        shape=shape[keep],
        nests=np.isin(data["eventType"][keep], _PUSH_POP).astype(np.uint8),
        row=np.flatnonzero(keep),
    )


def _texts(export: Export, text_id: I64, names: Intern[str], shapes: Intern[str]) -> tuple[I32, I32]:
    """Return, per NVTX row, the indices of its name and shapes, read from `text` or, by `textId`, from StringIds."""
    named: dict[int, int] = {}
    shaped: dict[int, int] = {}
    for key, name, shape in export.strings(((_TABLE, "textId"),), _cut("value")):
        assert isinstance(key, int)  # the SQL query guarantees it
        named[key] = names[text_or_unknown(name)]
        if isinstance(shape, str):
            shaped[key] = shapes[shape]
    name_of, shape_of = look_up(text_id, named, names["unknown"]), look_up(text_id, shaped, -1)
    if "text" in export.columns(_TABLE):
        rows = export.texts(_TABLE, _cut("text"))
        for row, (name, shape) in zip(range(len(name_of)), rows, strict=False):  # a damaged file may yield more rows
            if isinstance(name, str):
                name_of[row] = names[name]
                shape_of[row] = shapes[shape] if isinstance(shape, str) else -1
    return name_of, shape_of


def _cut(column: str) -> tuple[str, str]:
    """Return SQL expressions for the name and the shapes in PyTorch's range texts; NULL if `column` has no text."""

    def position(mark: str) -> str:
        return f"ifnull(nullif(instr({column}, '{mark}'), 0), {MAX_TEXT + 1})"

    ends = ", ".join(position(mark) for mark in (", seq = ", ", op_id = ", ", sizes = "))
    after = f"(instr({column}, ', sizes = ') + 10)"
    shape = f"substr({column}, {after}, max(0, {position(', input_op_ids')} - {after}))"
    return (
        f"CASE typeof({column}) WHEN 'text' THEN substr({column}, 1, min({ends}) - 1) END",
        f"CASE WHEN typeof({column}) = 'text' AND {after} > 10 THEN {shape} END",
    )


def innermost(ranges: NvtxRanges, chosen: I64, thread: I64, time: I64) -> I64:
    """Return the index of the innermost range, of `chosen` nesting ones, open at each `thread` and `time`; -1: none.

    The depth at a time is the number of starts minus the number of ends before it; the innermost range is the last one
    that started at this depth.
    """
    found = np.full(len(time), -1, np.int64)
    if not len(chosen):
        return found
    for one in np.unique(thread):
        asked = np.flatnonzero(thread == one)
        mine = chosen[ranges.thread[chosen] == one]
        mine = mine[np.lexsort((-ranges.end[mine], ranges.start[mine]))]
        start, ends = ranges.start[mine], np.sort(ranges.end[mine])
        depth = np.arange(1, len(mine) + 1) - np.searchsorted(ends, start, side="right")
        wanted = np.searchsorted(start, time[asked], "right") - np.searchsorted(ends, time[asked], "left")
        for level in np.unique(wanted[wanted > 0]):
            here, at = mine[depth == level], asked[wanted == level]
            last = np.searchsorted(ranges.start[here], time[at], "right") - 1
            hit = last >= 0
            found[at[hit]] = here[last[hit]]
    open_then = (found >= 0) & (ranges.end[found] >= time)
    return np.where(open_then, found, -1)


def nccl_calls(export: Export, ranges: NvtxRanges, names: Intern[str]) -> NcclCalls:
    """Return all threads' NCCL calls; a group's calls are launched by its outermost ncclGroupEnd."""
    matched = [_NCCL.match(text) for text in tuple(names)]
    is_nccl = np.array([m is not None for m in matched], bool)
    mine = np.flatnonzero(is_nccl[ranges.name] & (ranges.nests == 1))
    calls = NcclCalls()
    if not len(mine):
        return calls
    payloads = _payloads(export)
    function = [m.group(1) if m else "" for m in matched]
    mine = mine[np.lexsort((-ranges.end[mine], ranges.start[mine], ranges.thread[mine]))]
    stated = [payloads.get(int(row), {}) for row in ranges.row[mine]]
    sizes = {
        fields[_ID]: fields[_RANKS] for fields in stated if _ID in fields and 0 < fields.get(_RANKS, 0) < _MAX_RANKS
    }
    thread, open_until, depth, pending = -1, -1, 0, list[CollectiveInfo]()
    for index, fields in zip(mine.tolist(), stated, strict=True):
        name = function[ranges.name[index]]
        tid, start, end = int(ranges.thread[index]), int(ranges.start[index]), int(ranges.end[index])
        if tid != thread:
            thread, open_until, depth, pending = tid, -1, 0, []
        if {_RANKS, _RANK} <= fields.keys():
            process, device = tid >> 24 << 24, fields.get(_DEVICE, -1)
            calls.communicators.append(NcclCommunicator(
                process=process, device=device, rank=fields[_RANK], num_ranks=fields[_RANKS]))  # fmt: skip
        if start < open_until:  # inside another call, such as the sends of ncclAlltoAll
            continue
        open_until = end
        if name == "GroupStart":
            depth += 1
        elif name == "GroupEnd":
            depth = max(0, depth - 1)
        elif info := _info(name, fields, sizes):
            pending.append(info)
        if depth == 0 and pending:
            calls.thread.append(tid)
            calls.start.append(start)
            calls.end.append(end)
            calls.infos.append(pending)
            pending = []
    return calls


_OPS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter",
        "send", "recv"}  # fmt: skip


def _info(function: str, fields: Mapping[str, int], sizes: Mapping[int, int]) -> CollectiveInfo | None:
    """Return the metadata of one NCCL call; its message size in bytes is the call's count * size of its type."""
    op = normal_op(function)
    if op not in _OPS:
        return None
    size, group = fields.get(_SIZE), fields.get(_ID)
    num_ranks = sizes.get(group) if group is not None else None
    if size is not None and not 0 <= size < _MAX_BYTES:
        size = None
    whole = None if size is None or num_ranks is None else size * num_ranks
    into = {"reduce_scatter": whole, "all_to_all": whole, "scatter": whole, "recv": None}.get(op, size)
    out = {"all_gather": whole, "all_to_all": whole, "gather": whole, "send": None}.get(op, size)
    return CollectiveInfo(
        op=op,
        group=None if group is None else f"{group:#x}",
        group_size=num_ranks,
        in_nelems=into,
        out_nelems=out,
        dtype=None if size is None else "uint8",
    )


def one_per_kernel(infos: list[CollectiveInfo], kernels: int) -> list[CollectiveInfo]:
    """Return `infos` if there is one, or one per kernel of a joint launch; else a single info with their sums."""
    if len(infos) in (1, kernels):
        return infos
    ops = {info.op for info in infos}
    op = ops.pop() if len(ops) == 1 else "send_recv" if ops <= {"send", "recv"} else None
    groups = {info.group for info in infos}
    sized = all(info.dtype for info in infos)
    return [
        CollectiveInfo(
            op=op,
            group=infos[0].group if len(groups) == 1 else None,
            group_size=infos[0].group_size if len(groups) == 1 else None,
            in_nelems=_total(infos, "in_nelems") if sized else None,
            out_nelems=_total(infos, "out_nelems") if sized else None,
            dtype="uint8" if sized else None,
        )
    ]


def _total(infos: list[CollectiveInfo], side: str) -> int | None:
    """Return the sum of field `side` over calls (0 for a send's output or receive's input); None if a call lacks it."""
    values = [0 if info.op in ("send", "recv") and getattr(info, side) is None else getattr(info, side)
              for info in infos]  # fmt: skip
    return None if None in values else sum(values)


def _payloads(export: Export) -> dict[int, dict[str, int]]:
    """Return the decoded fields of NCCL's NVTX payloads, by row of the NVTX table; omit undecodable payloads."""
    entries = export.small("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "type", "name", "offset"))
    layouts: dict[object, dict[str, tuple[str, int]]] = {}
    for entry in entries:
        form, offset = _FORMATS.get(entry.get("type")), entry.get("offset") or 0  # type: ignore[call-overload]
        name = entry.get("name")
        if form and isinstance(offset, int) and 0 <= offset < 1 << 20 and isinstance(name, str):
            layouts.setdefault(entry.get("schemaId"), {})[name] = (form, offset)
    if not layouts or "binarydata" not in export.columns(_TABLE):
        return {}
    found: dict[int, dict[str, int]] = {}
    for row, (blob,) in enumerate(export.texts(_TABLE, ("binaryData",))):
        if isinstance(blob, bytes | str) and (fields := _decode(blob, layouts)):
            found[row] = fields
    return found


def _decode(blob: bytes | str, layouts: Mapping[object, Mapping[str, tuple[str, int]]]) -> dict[str, int] | None:
    if isinstance(blob, str):  # the column is declared TEXT; some tools keep hexadecimal digits in it
        try:
            blob = bytes.fromhex(blob)
        except ValueError:
            return None
    if len(blob) < _HEADER.size:
        return None
    layout = layouts.get(_HEADER.unpack_from(blob)[2], {})
    fields = {}
    for name, (form, offset) in layout.items():
        at = _HEADER.size + offset
        if at + struct.calcsize(form) <= len(blob):
            fields[name] = int(struct.unpack_from(form, blob, at)[0])
    return fields
