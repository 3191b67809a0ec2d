"""Read the tables of a Nsight Systems SQLite export safely, as columns; find its ranks, GPUs and UTC time.

The file is not trusted: it is opened read-only and immutable, only plain tables are read, and the type of every value
is checked, because SQLite lets any column hold anything.
"""

from __future__ import annotations

import re
import sqlite3
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from counterpoint.errors import BadTrace, printable
from counterpoint.trace.source import rank_from_name
from counterpoint.trace.timeline import I32, I64, Bools, Device

MAX_ROWS = 100_000_000  # of one table; a row costs about 150 bytes of memory while it is read
MAX_TEXT = 4096  # characters kept of one string
OPEN_END = -(2**63)  # `end` of a range that was still open when the capture stopped

_MAX_VALUE_BYTES = 64 << 20
_MAGIC = b"SQLite format 3\0"
_SMALL_TABLE = 100_000
_CHUNK = 50_000
_ODD = 0.25  # share of a table's rows: with more impossible times the file counts as damaged
_EXPORT_HINT = "export it with `nsys export --type sqlite FILE.nsys-rep` and give the .sqlite"
MAX_RANKS = 1024  # ranks in one export, which comes from one host

# Variables of launchers that give every rank its own process and so its own capture; the first that is set counts.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
_NEWEST_UTC_NS = 4 * 10**18  # the year 2096; anything beyond is not a time


@contextmanager
def open_export(path: Path, *, max_rows: int = MAX_ROWS) -> Iterator[Export]:
    """Yield the opened export at `path`; raise `BadTrace` if the file is not an export or SQLite cannot read it."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise BadTrace(f"cannot be read ({error.strerror})", path=str(path)) from None
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise BadTrace(f"is a Nsight Systems report, not an export; {_EXPORT_HINT}", path=str(path))
    if head != _MAGIC:
        raise BadTrace(f"is not an SQLite database; if it is a Nsight report, {_EXPORT_HINT}", path=str(path))
    connection = None
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        yield Export(connection, str(path), max_rows)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: names in a damaged schema
        raise BadTrace(f"SQLite cannot read it ({error}); {_EXPORT_HINT} again", path=str(path)) from None
    finally:
        if connection is not None:
            connection.close()


class Export:
    """Reads tables of one export as numpy columns, with defaults for missing values.

    `__init__` secures the read-only `connection` against hostile files. More than `max_rows` rows raise `BadTrace`.
    """

    def __init__(self, connection: sqlite3.Connection, path: str, max_rows: int) -> None:
        self.path, self._sql, self._max_rows = path, connection, max_rows
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON"):
            connection.execute(f"PRAGMA {pragma}")
        found = connection.execute("SELECT name, type, rootpage FROM sqlite_master WHERE type IN ('table', 'view')")
        # A view or a virtual table has no root page; it is refused because reading it would run code of the file.
        self._real = {str(name): kind == "table" and isinstance(root, int) and root > 0 for name, kind, root in found}
        self._columns: dict[str, frozenset[str]] = {}
        self.notes: list[str] = []  # remarks on data that was left out

    def columns(self, table: str) -> frozenset[str]:
        """Return the lower-case names of the columns of `table`; none if the export has no such table."""
        if table not in self._columns:
            if not self._real.get(table, True):
                raise self.bad(f"{table} is a view or a virtual table, not a table; {_EXPORT_HINT} again")
            rows = self._sql.execute(f'PRAGMA table_info("{table}")').fetchall() if table in self._real else []
            self._columns[table] = frozenset(str(row[1]).lower() for row in rows)
            if "rowid" in self._columns[table]:  # hides the row numbers by which columns are combined
                raise self.bad(f"{table} has a column 'rowid', which Nsight never writes; {_EXPORT_HINT} again")
        return self._columns[table]

    def has_tables(self, prefix: str) -> bool:
        """Return whether the name of any table begins with `prefix`."""
        return any(name.startswith(prefix) for name in self._real)

    def bad(self, reason: str) -> BadTrace:
        """Return a `BadTrace` that names this file and `reason`."""
        return BadTrace(reason, path=self.path)

    def ints(self, table: str, defaults: Mapping[str, int], *, open_ends: bool = False) -> dict[str, I64]:
        """Return integer columns of `table`, empty ones if the table is missing; raise `BadTrace` for too many rows.

        Values that are missing, NULL or no integers become those in `defaults`. Rows with impossible times (see
        `odd_times`) are left out; not with `open_ends`, where an `end` of NULL becomes `OPEN_END`.
        """
        present = [name for name in defaults if name.lower() in self.columns(table)]
        if not present:
            return {name: np.empty(0, np.int64) for name in defaults}
        missing_times = {"start", "end"} & (defaults.keys() - set(present))
        if missing_times:
            raise self.bad(f"{table} has no column {min(missing_times)!r}; {_EXPORT_HINT} again")
        try:  # integers and NULLs only, as Nsight writes them
            block = self._block(table, {n: _quick(n, defaults[n], open_ends) for n in present})
        except ValueError:
            block = self._block(table, {n: _careful(n, defaults[n], open_ends) for n in present})
        data = dict(zip(present, block, strict=True))
        rows = block.shape[1]
        if "start" in data and not open_ends:
            odd = self.odd_times(table, data["start"], data["end"])
            if odd.any():
                data, rows = {name: column[~odd] for name, column in data.items()}, int((~odd).sum())
        return {name: data[name] if name in data else np.full(rows, defaults[name]) for name in defaults}

    def texts(self, table: str, expressions: tuple[str, ...], *, where: str = "1") -> Iterator[tuple[object, ...]]:
        """Yield, per row, the values of the SQL `expressions` (never text of the file), in the row order of `ints`."""
        sql = f'SELECT {", ".join(expressions)} FROM "{table}" WHERE {where} ORDER BY rowid LIMIT ?'
        cursor = self._sql.execute(sql, (self._max_rows,))
        return chain.from_iterable(iter(lambda: cursor.fetchmany(_CHUNK), []))

    def small(self, table: str, names: tuple[str, ...]) -> list[dict[str, object]]:
        """Return the rows of a small table as dictionaries of the columns `names`, as far as these exist."""
        present = [name for name in names if name.lower() in self.columns(table)]
        if not present:
            return []
        fields = ", ".join(f'"{name}"' for name in present)
        rows = self._sql.execute(f'SELECT {fields} FROM "{table}" LIMIT {_SMALL_TABLE}')
        return [dict(zip(present, row, strict=True)) for row in rows]

    def strings(self, users: tuple[tuple[str, str], ...], expressions: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        """Yield `id` and `expressions` over `value` of the StringIds rows to which the columns `users` refer."""
        used = [f'SELECT "{c}" FROM "{t}"' for t, c in users if c.lower() in self.columns(t)]
        if not used or not {"id", "value"} <= self.columns("StringIds"):
            return iter(())
        where = f"typeof(id) = 'integer' AND id IN ({' UNION '.join(used)})"
        return self.texts("StringIds", ("id", *expressions), where=where)

    def names(self, *users: tuple[str, str]) -> Iterator[tuple[int, str]]:
        """Yield id and text (`unknown` if not text) of the StringIds rows to which the columns `users` refer."""
        text = f"CASE typeof(value) WHEN 'text' THEN substr(value, 1, {MAX_TEXT}) END"
        for key, name in self.strings(users, (text,)):
            assert isinstance(key, int)  # the SQL query guarantees it
            yield key, text_or_unknown(name)

    def _block(self, table: str, fields: Mapping[str, str]) -> I64:
        """Return integers [fields, rows]; let SQLite join each column into one text: twice as fast as fetching rows."""
        lists = ", ".join(f"group_concat({field})" for field in fields.values())
        inner = ", ".join(f'"{name}"' for name in fields)
        chunk = f'SELECT rowid AS at, {inner} FROM "{table}" WHERE rowid > ? ORDER BY rowid LIMIT {_CHUNK}'
        query = f"SELECT max(at), count(*), {lists} FROM ({chunk})"
        blocks, rows, last = [np.empty((len(fields), 0), np.int64)], 0, -(2**63)
        while True:
            at, count, *texts = self._sql.execute(query, (last,)).fetchone()
            if count == 0:
                return np.concatenate(blocks, axis=1)
            if not isinstance(at, int) or at <= last:  # row numbers of a damaged file may not increase
                raise self.bad(f"{table} is damaged: its rows are out of order; {_EXPORT_HINT} again")
            blocks.append(np.stack([_numbers(text, count) for text in texts]))
            rows, last = rows + count, at
            if rows > self._max_rows:
                raise self.bad(f"{table} has more than {self._max_rows} rows; capture fewer steps, or raise max_rows")

    def odd_times(self, table: str, start: I64, end: I64, among: Bools | None = None) -> Bools:
        """Return a mask of rows (of `among`) with a start below 0 ns or an end before the start, and add a note.

        Such rows are left out; if they are more than a quarter of the table, raise `BadTrace`.
        """
        odd = (start < 0) | (end < start)
        if among is not None:
            odd &= among
        count, rows = int(odd.sum()), len(start) if among is None else int(among.sum())
        if count:
            row = int(np.argmax(odd))
            came = f"start {start[row]}, end {end[row]}" if min(start[row], end[row]) >= 0 else "not whole ns >= 0"
            if count > _ODD * rows:
                raise self.bad(f"{table} row {row + 1} has impossible times ({came}); {_EXPORT_HINT} again")
            self.notes.append(
                f"{count} of {rows} rows of {table} left out for impossible times (row {row + 1}: {came})"
            )
        return np.asarray(odd)


def _numbers(text: str, count: int) -> I64:
    """Parse the `count` integers in `text`; raise ValueError if `text` holds anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns if it stops at text that is not a number
        try:
            numbers = np.fromstring(text, np.int64, sep=",")
        except DeprecationWarning:
            raise ValueError("not all integers") from None
    if len(numbers) != count:
        raise ValueError("not as many integers as rows")
    return numbers


def _quick(name: str, default: int, open_ends: bool) -> str:
    if name in ("start", "end"):
        return _careful(name, default, open_ends)
    return f'ifnull("{name}", {default})'


def _careful(name: str, default: int, open_ends: bool) -> str:
    null = "WHEN 'null' THEN -9223372036854775807 - 1" if open_ends and name == "end" else ""
    return f'CASE typeof("{name}") WHEN \'integer\' THEN "{name}" {null} ELSE {default} END'


def text_or_unknown(value: object) -> str:
    """Return `value` if it is text, else "unknown": a string column may also hold NULL or a blob."""
    return value if isinstance(value, str) and value else "unknown"


def look_up(ids: I64, known: Mapping[int, int], unknown: int) -> I32:
    """Return `known[id]` for each of `ids`, or `unknown` for ids that are not in `known`."""
    unique, inverse = np.unique(ids, return_inverse=True)
    return np.array([known.get(int(one), unknown) for one in unique], np.int32)[inverse]


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclCommunicator:
    """Holds the facts that NCCL recorded when a process joined a communicator."""

    process: int  # globalPid
    device: int
    rank: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankId:
    """Identifies one rank: one process and a device that it uses."""

    process: int  # globalPid
    device: int  # CUDA ordinal in that process
    number: int
    known: bool
    world_size: int | None = None


def find_ranks(
    export: Export,
    process: I64,
    device: I64,
    is_kernel: npt.NDArray[np.bool_],
    communicators: Sequence[NcclCommunicator],
    file_name: str,
) -> list[RankId]:
    """Return the (process, device) pairs that ran kernels (or only copies, if no pair ran kernels), ordered by rank.

    A single pair gets its rank from the launcher's environment, else the file name, else NCCL. Several pairs get the
    ranks of their largest NCCL communicator, else consecutive numbers, after the ranks of earlier nodes if known.
    """
    chosen = is_kernel if is_kernel.any() else np.ones_like(is_kernel)
    processes, which = np.unique(process[chosen], return_inverse=True)
    devices, used = np.unique(device[chosen], return_inverse=True)
    pairs = [(int(processes[p]), int(devices[d])) for p, d in
             (divmod(int(code), len(devices)) for code in np.unique(which * len(devices) + used))]  # fmt: skip
    if len(pairs) > MAX_RANKS:
        raise export.bad(f"claims {len(pairs)} pairs of process and device; at most {MAX_RANKS} fit in one capture")
    variables = _environment(export)
    by_nccl = _by_nccl(pairs, communicators)
    if len(pairs) == 1:
        return [_lone(pairs[0], variables, file_name, by_nccl)]
    if by_nccl:
        return sorted(by_nccl, key=lambda rank: rank.number)
    node = next((variables[key] for key in _NODE_VARIABLES if key in variables), 0)
    return [RankId(process=p, device=d, number=node * len(pairs) + at, known=False) for at, (p, d) in enumerate(pairs)]


def _lone(pair: tuple[int, int], variables: dict[str, int], file_name: str, by_nccl: list[RankId]) -> RankId:
    process, device = pair
    for name, size in _VARIABLES:
        if name in variables:
            world = variables.get(size)
            return RankId(process=process, device=device, number=variables[name], known=True, world_size=world)
    named = rank_from_name(file_name)
    if named is None and "LOCAL_RANK" in variables:
        named = variables["LOCAL_RANK"]
    # A lone capture cannot show whether NCCL's largest communicator is the whole job, so it does not settle the rank.
    number = named if named is not None else by_nccl[0].number if by_nccl else 0
    return RankId(process=process, device=device, number=number, known=False)


def _by_nccl(pairs: Sequence[tuple[int, int]], communicators: Sequence[NcclCommunicator]) -> list[RankId]:
    """Return each pair's rank in the largest NCCL communicator; an empty list unless all pairs have distinct ranks."""
    size = max((one.num_ranks for one in communicators), default=0)
    joined: dict[int, list[NcclCommunicator]] = {}
    for one in communicators:
        if one.num_ranks == size:
            joined.setdefault(one.process, []).append(one)
    devices = Counter(process for process, _ in pairs)
    found = []
    for process, device in pairs:
        lone = devices[process] == 1  # processes with one device, where NCCL's number of the device is not needed
        numbers = {one.rank for one in joined.get(process, ()) if lone or one.device == device}
        if len(numbers) != 1 or not 0 <= (number := numbers.pop()) < size:
            return []
        found.append(RankId(process=process, device=device, number=number, known=True, world_size=size))
    return found if len({rank.number for rank in found}) == len(pairs) else []


def _environment(export: Export) -> dict[str, int]:
    """Return the launcher's environment variables with numbers as values, as the export recorded them."""
    stored = [row.get("value") for row in export.small("TARGET_INFO_SYSTEM_ENV", ("name", "value"))
              if row.get("name") == "DeviceEnvironment"]  # fmt: skip
    stored += [row.get("value") for row in export.small("META_DATA_CAPTURE", ("name", "value"))
               if str(row.get("name")).endswith(":ENVIRONMENT_VARIABLE")]  # fmt: skip
    wanted = {name for pair in _VARIABLES for name in pair} | {*_NODE_VARIABLES, "LOCAL_RANK"}
    found = {}
    for text in stored:
        for name, value in re.findall(r'(?:^|;)([A-Z_]+)="?(\d{1,6})"?(?=;|$)', text) if isinstance(text, str) else ():
            if name in wanted:
                found[name] = int(value)
    return found


def device_of(export: Export, rank: RankId) -> Device:
    """Return the properties of the GPU of `rank` from TARGET_INFO_GPU; missing properties are None."""
    fields = ("id", "name", "smCount", "maxRegistersPerSm", "maxShmemPerSm", "maxWarpsPerSm", "threadsPerWarp",
              "maxThreadsPerSm")  # fmt: skip
    gpus = export.small("TARGET_INFO_GPU", fields)
    links = export.small("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"))
    pid = rank.process >> 24 & 0xFFFFFF
    mine = [link.get("gpuId") for link in links if link.get("cudaId") == rank.device and link.get("pid") in (pid, None)]
    number = mine[0] if mine else rank.device
    gpu = next((one for one in gpus if one.get("id") == number), gpus[0] if len(gpus) == 1 else None)
    if gpu is None:
        return Device()
    whole = {key: value for key, value in gpu.items() if isinstance(value, int) and 0 < value < 1 << 31}
    warps, width = whole.get("maxWarpsPerSm"), whole.get("threadsPerWarp")
    name = gpu.get("name")
    return Device(
        name=printable(name, 100) if isinstance(name, str) and name else None,
        num_sms=whole.get("smCount"),
        regs_per_sm=whole.get("maxRegistersPerSm"),
        smem_per_sm=whole.get("maxShmemPerSm"),
        threads_per_sm=whole.get("maxThreadsPerSm") or (warps * width if warps and width else None),
        index=number if isinstance(number, int) and len(gpus) > 1 else None,
        host_gpus=len(gpus) if len(gpus) > 1 else None,
    )


def utc_ns(export: Export, event_ns: int) -> int:
    """Return the UTC (ns) of `event_ns` on the export's clock; `event_ns` itself if the session's start is unknown.

    Times count from the start of the session, or (newer nsys, exported without normalising) on the system clock, in
    which case the analysis starts at the session's `systemClockNs`.
    """
    session = export.small("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs", "systemClockNs"))
    utc = session[0].get("utcEpochNs") if session else None
    if not isinstance(utc, int) or not 0 < utc < _NEWEST_UTC_NS:
        return event_ns
    clock = session[0].get("systemClockNs")
    starts = [row.get("startTime") for row in export.small("ANALYSIS_DETAILS", ("startTime",))]
    if isinstance(clock, int) and clock in starts and 0 <= clock <= event_ns:
        return utc + event_ns - clock
    return utc + event_ns
