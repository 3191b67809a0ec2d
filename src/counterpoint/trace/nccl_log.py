"""Read NCCL's logs: lines of `NCCL_DEBUG=INFO` wherever they stand in a file, and the JSON of NCCL Inspector.

Lines have had these forms since NCCL 2.12: the version, environment variables that were taken, channels, transports and
the end of a communicator's set-up; with `NCCL_DEBUG_SUBSYS=...,TUNING` also one line for each call, with the algorithm
by number (before 2.25) or by name. NCCL Inspector (2.28) writes one JSON object a line. What does not look like any of
these is passed over, and every number that is kept has a bound.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import BadTrace
from counterpoint.trace.source import reading

_LARGEST_BYTES = 1 << 30  # of all files together
_MOST_FILES = 20_000
_LONGEST_LINE = 1 << 16
_MOST_KINDS = 10_000  # of calls, communicators, transports and warnings that are told apart
_LINE = re.compile(rb"(?:^|\s)([^\s:]{1,200}):(\d{1,10}):\d{1,10} \[(-?\d{1,4})\].{0,80}?NCCL (INFO|WARN) (.*)")
_VERSION = re.compile(r"NCCL version (\d[\w.+-]{0,40})")
_SETTING = re.compile(r"^(NCCL_\w{1,60}) set (?:by environment )?to (.{1,200}?)\.?$")
_CHANNELS = re.compile(
    r"^(\d{1,4}) coll channels,.*?(?:(\d{1,4}) nvls channels, )?\d+ p2p channels, (\d{1,4}) p2p channels per"
)

_NODES = re.compile(r"^comm (0x\w{1,16}) rank \d+ n[rR]anks \d+ nNodes (\d{1,7}) ")
_READY = re.compile(r"comm (0x\w{1,16}) rank (\d{1,8}) nranks (\d{1,8}) .*?(?:commId (0x\w{1,18}) )?- Init COMPLETE")
_CONNECTION = re.compile(r"^Channel \d+(?:/\d+)? : .{1,80}? via ((?:P2P|SHM|NET|NVLS|CollNet)\S{0,60})")
_CHOICE = re.compile(
    r"^(\w{1,30})(?: \[\w+\])?: (\d{1,15}) Bytes -> (?:Algo (\w{1,30}) proto (\w{1,20})|Kernel (\S{1,80}))"
    r"(?:.*?\{(\d{1,4})\.\.(\d{1,4})\})?"
)
_Process = tuple[bytes, bytes]
_ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedCommunicator:
    """Holds one rank's view of a communicator; None: not logged."""

    ranks: int
    hosts: int | None
    channels: int | None
    nvls_channels: int | None
    p2p_channels_per_peer: int | None


@dataclass(kw_only=True, slots=True)
class NcclLog:
    """Collects what NCCL's lines in the files of a job say."""

    files: tuple[str, ...]
    lines: int = 0
    version: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    transports: Counter[str] = field(default_factory=Counter)
    communicators: dict[str, list[LoggedCommunicator]] = field(default_factory=dict)  # by id, one for each rank
    choices: Counter[tuple[str, int, str, str | None, int | None]] = field(default_factory=Counter)
    measured: dict[tuple[str, int, int, int | None], dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)  # the first line with each of `_SAYS`
    warnings: Counter[str] = field(default_factory=Counter)


_SAYS = {  # lines that show a problem
    "no_infiniband": re.compile(r"NET/IB : No device found"),
    "p2p_off": re.compile(r"P2P is disabled between"),
    "no_nvls": re.compile(r"NVLS multicast support is not available"),
    "no_gdr": re.compile(r"GPU Direct RDMA Disabled"),
}


def read_nccl_logs(sources: Sequence[str]) -> NcclLog:
    """Return what NCCL's lines in these files, folders or globs say.

    Raises:
        BadTrace: a file that cannot be read, or no line of NCCL in any of them.
    """
    paths = [path for source in sources for path in _paths(source)]
    total = sum(path.stat().st_size for path in paths)
    if len(paths) > _MOST_FILES or total > _LARGEST_BYTES:
        raise BadTrace(
            f"{len(paths)} logs of {total >> 20} MiB; at most {_MOST_FILES} of {_LARGEST_BYTES >> 20} MiB are read: "
            "give the logs of some ranks",
            path=sources[0],
        )
    log = NcclLog(files=tuple(map(str, paths)))
    for path in paths:
        _read(path, log)
    if not log.lines:
        raise BadTrace(
            "no line of NCCL: run with NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,P2P,NET,TUNING and "
            "NCCL_DEBUG_FILE=nccl.%h.%p, or with NCCL Inspector",
            path=sources[0],
        )
    return log


def _paths(source: str) -> list[Path]:
    path = Path(source)
    with reading(source):
        if path.is_dir():
            return sorted(p for p in path.rglob("*") if p.is_file())
        if has_magic(source) and not path.exists():
            found = [Path(p) for p in sorted(glob(source, recursive=True))]  # noqa: PTH207 (absolute patterns)
            if not found:
                raise BadTrace("no log matches this pattern; quote it and check the folder", path=source)
            return [p for p in found if p.is_file()]
        if not path.is_file():
            raise BadTrace("not a regular file" if path.exists() else "no such file or folder", path=source)
    return [path]


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; of a longer line, only its first 64 KiB."""
    with reading(str(path)), path.open("rb") as file:
        whole = True
        while line := file.readline(_LONGEST_LINE):
            if whole:
                yield line
            whole = line.endswith(b"\n")


def _read(path: Path, log: NcclLog) -> None:
    """Add what one file says to `log`; a file may hold the lines of several ranks."""
    reader = _FileReader(path=path, log=log)
    for raw in _lines(path):
        if b'"coll_perf"' in raw:
            _measured(raw, log)
        elif found := _LINE.search(raw):
            log.lines += 1
            text = found.group(5).decode("utf-8", "replace").strip()
            if found.group(4) == b"WARN":
                _count(log.warnings, text[:300])
            reader.add((found.group(1), found.group(2)), text)
        elif version := _VERSION.search(raw[:400].decode("utf-8", "replace")):
            log.version, log.lines = version.group(1), log.lines + 1


@dataclass(kw_only=True, slots=True)
class _FileReader:
    """Reads the lines of one file; a process is a host and a process number."""

    path: Path
    log: NcclLog
    channels: dict[_Process, tuple[int | None, ...]] = field(default_factory=dict)  # of the communicator being set up
    hosts: dict[tuple[_Process, str], int] = field(default_factory=dict)  # by communicator

    def add(self, process: _Process, text: str) -> None:
        """Add what one line says to the log."""
        log = self.log
        for name, says in _SAYS.items():
            if name not in log.said and says.search(text):
                log.said[name] = text[:300]
        if (setting := _SETTING.match(text)) and len(log.settings) < _MOST_KINDS:
            log.settings[setting.group(1)] = setting.group(2)
        elif connection := _CONNECTION.match(text):
            _count(log.transports, _transport(connection.group(1)))
        elif choice := _CHOICE.match(text):
            _count(log.choices, _choice(choice))
        elif version := _VERSION.search(text):
            log.version = version.group(1)
        else:
            self._set_up(process, text)

    def _set_up(self, process: _Process, text: str) -> None:
        """Add a communicator when its set-up ends; lines before tell its channels and hosts."""
        if number := _CHANNELS.match(text):
            self.channels[process] = tuple(None if each is None else int(each) for each in number.groups())
        elif nodes := _NODES.match(text):
            self.hosts[process, nodes.group(1)] = int(nodes.group(2))
        elif ready := _READY.search(text):
            pointer, _, ranks, ident = ready.groups()
            coll, nvls, peer = self.channels.pop(process, (None, None, None))
            key, known = ident or f"{self.path}:{pointer}", self.log.communicators
            view = LoggedCommunicator(
                ranks=int(ranks),
                hosts=self.hosts.get((process, pointer)),
                channels=coll,
                nvls_channels=nvls,
                p2p_channels_per_peer=peer,
            )
            if key in known or len(known) < _MOST_KINDS:
                known.setdefault(key, []).append(view)


def _count(counter: Counter[Any], key: object) -> None:
    if key in counter or len(counter) < _MOST_KINDS:
        counter[key] += 1


def _transport(via: str) -> str:
    """Return the transport without the number of its device: `NET/IB/0/GDRDMA` is `NET/IB/GDRDMA`."""
    return "/".join(part for part in via.split("(")[0].split("/") if not part.isdigit())


def _choice(found: re.Match[str]) -> tuple[str, int, str, str | None, int | None]:
    op, size, algorithm, protocol, kernel, low, high = found.groups()
    channels = int(high) - int(low) + 1 if low is not None else None
    if kernel is not None:
        return op, int(size), kernel, None, channels
    return op, int(size), _named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS), channels


def _named(text: str, names: Sequence[str]) -> str:
    """Return the name of an algorithm or protocol that is given by name or, in older releases, by number."""
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else text.lower()


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int
    nnodes: int | None = None


class _Performance(msgspec.Struct):
    coll: str
    coll_msg_size_bytes: int
    coll_exec_time_us: float
    coll_busbw_gbs: float


class _Inspected(msgspec.Struct):
    """Holds the keys that are read of a record of NCCL Inspector."""

    header: _Header
    coll_perf: _Performance


def _measured(raw: bytes, log: NcclLog) -> None:
    """Add a record of NCCL Inspector to `log`; a record that is not as expected is passed over."""
    try:
        record = msgspec.json.decode(raw, type=_Inspected)
    except msgspec.DecodeError:
        return
    log.lines += 1
    perf, header = record.coll_perf, record.header
    key = (perf.coll[:60], perf.coll_msg_size_bytes, header.n_ranks, header.nnodes)
    if key not in log.measured and len(log.measured) >= _MOST_KINDS:
        return
    of_ranks = log.measured.setdefault(key, defaultdict(list))
    of_ranks[f"communicator {header.id[:20]}, rank {header.rank}"].append((perf.coll_exec_time_us, perf.coll_busbw_gbs))
