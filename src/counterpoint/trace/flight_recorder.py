"""Read dumps of NCCL's flight recorder: the collectives that each rank had scheduled, started or completed.

torch writes one file for each rank, a pickle (`TORCH_NCCL_DUMP_ON_TIMEOUT`, `_dump_fr_trace`) or JSON, which has no
stacks; versions 1.1 (torch 2.2) to 2.10 (torch 2.13) are read, of NCCL, Gloo and backends that write the same. A pickle
can name code to run: here only the instructions that make dicts, lists, tuples, strings, numbers, True, False and None
are carried out, and any other one is refused. A pickle may refer to one list many times, so a small pickle can
stand for a large structure: what is read of each list is limited.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import BadTrace

_LARGEST_BYTES = 512 << 20  # of one dump; those of 2000 collectives with stacks: 5 MB
_MOST_FILES = 100_000
_MOST_ENTRIES = 200_000
_MOST_TENSORS = 256  # of one collective are compared
_MOST_DIMENSIONS = 16
_MOST_FRAMES = 64
_HEAD_BYTES = 1 << 16
_DUMP_KEYS = (b"pg_config", b"entries", b"pg_status", b"comm_lib_version", b"nccl_version")
_TRACE_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b"SQLite format 3\0")
_RANK = re.compile(r"(\d{1,6})(?:\.(?:json|pkl|pickle|dump|txt))?$")
_TORCH = re.compile(r"(^|/)torch/")
_PLAIN = (
    pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT,
    pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE,
    pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET,
    pickle.LONG_BINGET, pickle.MEMOIZE,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightEntry:
    """Holds one collective, send or receive that a rank has scheduled."""

    group: str
    description: str
    seq: int  # sequence number in the group, of collectives or of sends and receives
    is_p2p: bool
    operation: str  # all_reduce, send 0->1, ...
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    state: str  # scheduled | started | completed
    frame: str | None  # the innermost line of Python that is not torch's


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightDump:
    """Holds the dump of one rank; `whole`: the recorder overwrote no earlier entry."""

    rank: int
    path: str
    version: str | None
    groups: Mapping[str, tuple[str, tuple[int, ...]]]  # by name: description, ranks
    entries: tuple[FlightEntry, ...]
    last: Mapping[str, tuple[int | None, int | None, int | None]]  # by group: enqueued, started, completed
    whole: bool


class _PlainUnpickler(pickle._Unpickler):
    """Unpickles plain values only, such as numbers, strings, lists and dictionaries.

    It extends the unpickler in Python, because the one in C also obeys instructions that fill the memory.
    """

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN}  # noqa: RUF012 (as in the base class)


def find_dumps(sources: Sequence[str]) -> list[Path]:
    """Return the paths of dumps in `sources` (files, folders, globs); an empty list if any file is a trace."""
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            candidates: Iterator[Path] = (p for p in sorted(path.rglob("*")) if p.is_file())
        elif has_magic(source) and not path.exists():
            candidates = (Path(p) for p in sorted(glob(source, recursive=True)))  # noqa: PTH207 (absolute patterns)
        else:
            candidates = iter([path] if path.is_file() else [])
        for candidate in candidates:
            kind = _kind(candidate)
            if kind == "trace":
                return []
            if kind == "dump":
                found.append(candidate)
            if len(found) > _MOST_FILES:
                raise BadTrace(f"more than {_MOST_FILES} dumps; give those of one job", path=source)
    return found


def _kind(path: Path) -> str | None:
    """Return `dump` or `trace` by the first bytes of a file; None if it is neither or cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if any(key in head for key in _TRACE_KEYS) or head.startswith(b"\x1f\x8b"):
        return "trace"
    start = head.lstrip(b" \t\r\n")[:1]
    plain = head[:1] == b"\x80" or start == b"{"
    return "dump" if plain and any(key in head for key in _DUMP_KEYS) else None


def read_dump(path: Path) -> FlightDump:
    """Return the dump of the rank whose number ends the file's name.

    Raises:
        BadTrace: too large, damaged, a pickle of more than plain values, or a name without a rank.
    """
    label = os.fsencode(path).decode("utf-8", "replace")
    rank = _RANK.search(path.name)
    if rank is None:
        raise BadTrace("its name does not end with a rank, as in nccl_trace_rank_3", path=label)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise BadTrace(f"larger than {_LARGEST_BYTES >> 20} MiB: no flight-recorder dump", path=label)
        content = path.read_bytes()
    except OSError as error:
        raise BadTrace(f"cannot be read: {error.strerror or error}", path=label) from None
    try:
        return _dump(_decoded(content, label), int(rank[1]), label)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise BadTrace(f"not a flight-recorder dump as torch 2.2 or newer writes it: {error!r}", path=label) from None


def _decoded(content: bytes, label: str) -> dict[str, Any]:
    if content[:1] == b"\x80":
        file = io.BytesIO(content)
        try:
            found = _PlainUnpickler(file).load()
        except KeyError as error:
            code = bytes(error.args) if isinstance(error.args[0], int) else b"?"
            raise BadTrace(
                f"a pickle with the instruction {code!r}, which a flight-recorder dump does not need: refused",
                path=label,
                offset=file.tell(),
            ) from None
        except Exception as error:
            raise BadTrace(f"the pickle is damaged: {error!r}", path=label, offset=file.tell()) from None
    else:
        try:
            found = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise BadTrace(f"the JSON is damaged: {error}", path=label) from None
    if not isinstance(found, dict):
        raise TypeError(f"it holds a {type(found).__name__}")
    return found


def _dump(found: dict[str, Any], rank: int, label: str) -> FlightDump:
    raw = found.get("entries") or []
    if len(raw) > _MOST_ENTRIES:
        raise ValueError(f"{len(raw)} entries")
    groups = {}
    for name, config in (found.get("pg_config") or {}).items():
        stated = config if isinstance(config, dict) else {"ranks": config}  # before version 2.0: only the ranks
        if ranks := _ranks(stated["ranks"]):  # Gloo's groups have an entry without ranks
            groups[str(name)] = (str(stated.get("desc", "")), ranks)
    version = found.get("version")
    return FlightDump(
        rank=rank,
        path=label,
        version=None if version is None else str(version),
        groups=groups,
        entries=_entries(raw),
        last=_last(found, raw),
        whole=not raw or int(raw[0].get("record_id", 0)) == 0,
    )


def _last(found: dict[str, Any], raw: Sequence[dict[str, Any]]) -> dict[str, tuple[int | None, int | None, int | None]]:
    """Return the last enqueued, started and completed sequence number, by name of process group.

    A group that also sends and receives is left out, since its numbers may be of these calls; so are Gloo's groups,
    whose numbers count all calls.
    """
    mixed = {str(e.get("pg_id")) for e in raw if e.get("is_p2p") or _backend(e) == "gloo"}
    names = {str(e["pg_id"]): _group_of(e)[0] for e in raw if "pg_id" in e}
    last = {}
    for key, status in (found.get("pg_status") or {}).items():
        if str(key) in names and str(key) not in mixed:
            last[names[str(key)]] = (
                _seq(status.get("last_enqueued_collective")),
                _seq(status.get("last_started_collective")),
                _seq(status.get("last_completed_collective")),
            )
    return last


def _entries(raw: Sequence[dict[str, Any]]) -> tuple[FlightEntry, ...]:
    """Return a dump's calls; an entry `coalesced` is no call, but states the progress of the batch of calls before it.

    The calls of a batch share a sequence number, and are never marked as started or completed themselves. Only the
    calls show which of the batch's two sequence numbers is theirs.
    """
    found: list[FlightEntry] = []
    latest: dict[str, list[int]] = {}  # by group: indices of the last calls that share a sequence number
    for each in raw:
        entry = _entry(each)
        batch = latest.get(entry.group, [])
        of = found[batch[-1]] if batch else entry
        if entry.operation != "coalesced":
            if not batch or (of.is_p2p, of.seq) != (entry.is_p2p, entry.seq):
                latest[entry.group] = batch = []
            batch.append(len(found))
            found.append(entry)
        elif batch and _sequence(each, of.is_p2p) == of.seq:
            for at in batch:
                found[at] = replace(found[at], state=entry.state)
        elif entry.state != "completed":  # its calls were overwritten
            found.append(entry)
    return tuple(found)


def _entry(raw: dict[str, Any]) -> FlightEntry:
    group, description = _group_of(raw)
    operation = str(raw["profiling_name"]).partition(":")[2] or str(raw["profiling_name"])
    is_p2p = bool(raw.get("is_p2p", operation.startswith(("send", "recv"))))
    state = raw["state"]
    if state not in ("scheduled", "started", "completed"):
        raise ValueError(f"state {state!r}")
    if _backend(raw) == "gloo" and raw.get("retired"):  # Gloo's calls have no events, but are retired when they end
        state = "completed"
    return FlightEntry(
        group=group,
        description=description,
        seq=_sequence(raw, is_p2p),
        is_p2p=is_p2p,
        operation=operation[:200],
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        input_dtypes=_texts(raw.get("input_dtypes")),
        output_dtypes=_texts(raw.get("output_dtypes")),
        state=state,
        frame=_frame(raw.get("frames")),
    )


def _sequence(raw: dict[str, Any], is_p2p: bool) -> int:
    """Return a call's sequence number; from version 2.0 on, sends and receives are numbered apart from collectives."""
    key = "p2p_seq_id" if is_p2p else "collective_seq_id"
    return int(raw[key] if key in raw else raw["seq_id"])


def _backend(raw: dict[str, Any]) -> str:
    return str(raw["profiling_name"]).partition(":")[0]


def _group_of(raw: dict[str, Any]) -> tuple[str, str]:
    """Return name and description of a call's process group; before version 2.0, its number and ""."""
    group = raw.get("process_group")
    if group is None:
        return str(int(raw["pg_id"])), ""
    return str(group[0]), str(group[1]) if len(group) > 1 else ""


def _sizes(raw: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in size[:_MOST_DIMENSIONS]) for size in (raw or [])[:_MOST_TENSORS])


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(str(text)[:40] for text in (raw or [])[:_MOST_TENSORS])


def _frame(raw: Any) -> str | None:
    """Return the innermost stack frame outside of torch, as `train (train.py:31)`; None without a recorded stack."""
    for frame in (raw or [])[:_MOST_FRAMES]:
        file = str(frame["filename"])[-200:]
        if not _TORCH.search(file):
            return f"{str(frame['name'])[:80]} ({file.rpartition('/')[2]}:{int(frame['line'])})"
    return None


def _ranks(raw: Any) -> tuple[int, ...]:
    return tuple(msgspec.json.decode(raw, type=list[int]) if isinstance(raw, str) else (int(r) for r in raw))


def _seq(raw: Any) -> int | None:
    """Return a sequence number as an integer, also from a JSON string; None for -1."""
    return None if raw is None or int(raw) < 0 else int(raw)
