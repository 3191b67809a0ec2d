"""Builds small Nsight Systems SQLite exports: say the values that matter, the rest are those of a plain kernel."""

import sqlite3
import struct
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, EVENT, GRAPH = (
    f"CUPTI_ACTIVITY_KIND_{table}"
    for table in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "CUDA_EVENT", "GRAPH_TRACE")
)
NVTX, GPUS, CUDA_DEVICES = "NVTX_EVENTS", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"
STREAMS = "TARGET_INFO_CUDA_STREAM"
ENTRIES, CAPTURE = "NVTX_PAYLOAD_SCHEMA_ENTRIES", "META_DATA_CAPTURE"
SESSION, ANALYSIS = "TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS"

_GPU_ROW = {"start": 0, "end": 0, "deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": None, "globalPid": 0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    KERNEL: _GPU_ROW | {
        "demangledName": None, "shortName": None, "registersPerThread": 32, "gridX": 1, "gridY": 1, "gridZ": 1,
        "blockX": 128, "blockY": 1, "blockZ": 1, "staticSharedMemory": 0, "dynamicSharedMemory": 0, "graphNodeId": None,
        "clusterX": 0, "clusterY": 0, "clusterZ": 0,
    },
    MEMCPY: _GPU_ROW | {
        "bytes": 0, "copyKind": 8, "srcKind": 2, "dstKind": 2, "srcDeviceId": None, "dstDeviceId": None,
    },
    MEMSET: _GPU_ROW | {"value": 0, "bytes": 0, "memKind": 2},
    GRAPH: _GPU_ROW | {"graphId": 1, "graphExecId": 1},
    RUNTIME: {"start": 0, "end": 0, "globalTid": 0, "correlationId": None, "nameId": None, "returnValue": 0},
    SYNC: _GPU_ROW | {"syncType": 2, "eventId": 0, "eventSyncId": None},
    EVENT: {"deviceId": 0, "streamId": 7, "correlationId": None, "globalPid": 0, "eventId": 0, "eventSyncId": None},
    NVTX: {
        "start": 0, "end": None, "eventType": 59, "rangeId": None, "text": None, "globalTid": 0, "textId": None,
        "domainId": 0, "binaryData": None,
    },
    GPUS: {
        "id": 0, "name": "NVIDIA H200", "smCount": 132, "maxRegistersPerSm": 65536, "maxShmemPerSm": 233472,
        "maxWarpsPerSm": 64, "threadsPerWarp": 32, "computeMajor": 9, "computeMinor": 0,
    },
    CUDA_DEVICES: {"gpuId": 0, "cudaId": 0, "pid": 0},
    STREAMS: {"streamId": 7, "processId": 1, "contextId": 1, "priority": 0, "flag": 2},
    ENTRIES: {"domainId": 1, "schemaId": 0, "idx": 0, "type": 18, "name": "", "offset": None},
    CAPTURE: {"name": "", "value": ""},
    SESSION: {"utcEpochNs": 0, "systemClockNs": 0},
    ANALYSIS: {"startTime": 0},
}  # fmt: skip
_INIT, _COLL = 16777218, 16777220  # NCCL's schemas


def pid(number: int) -> int:
    return 1 << 48 | number << 24


class NsysExport:
    """Rows to be written; `text` gives out ids of StringIds, `write` makes the file."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def add(self, table: str, **values: Any) -> None:
        assert values.keys() <= _DEFAULTS[table].keys(), values
        self.rows.setdefault(table, []).append(_DEFAULTS[table] | values)

    def kernel(self, name: str, start: int, end: int, *, process: int = 1, launch: tuple[int, int] | None = None,
               call: str = "cudaLaunchKernel_v7000", **values: Any) -> int:  # fmt: skip
        """A kernel (times in ns) and, with `launch`, the call that launched it on thread 1; returns the correlation."""
        correlation = len(self.rows.get(KERNEL, ())) + 1
        self.add(KERNEL, demangledName=self.text(name), shortName=self.text("short"), start=start, end=end,
                 globalPid=pid(process), **{"correlationId": correlation} | values)  # fmt: skip
        if launch:
            self.add(RUNTIME, start=launch[0], end=launch[1], globalTid=pid(process) | 1, nameId=self.text(call),
                     correlationId=correlation)  # fmt: skip
        return correlation

    def range(self, text: str | None, start: int, end: int | None, *, process: int = 1, **values: Any) -> None:
        """An NVTX push-pop range on thread 1 (times in ns)."""
        self.add(NVTX, **{"text": text, "start": start, "end": end, "globalTid": pid(process) | 1} | values)

    def nccl(self, text: str, start: int, end: int, *, size: int, comm: int = 0xABC, process: int = 1) -> None:
        """An NCCL call with the payload that `--include-blobs=true` keeps."""
        payload = _payload(_COLL, struct.pack("<QQ", comm, size))
        self.range(text, start, end, process=process, domainId=1, binaryData=payload)

    def nccl_init(self, *, rank: int, num_ranks: int, comm: int = 0xABC, process: int = 1) -> None:
        payload = _payload(_INIT, struct.pack("<Qiiii", comm, num_ranks, rank, 0, 0))
        self.range("ncclCommInitRank", 1, 2, process=process, domainId=1, binaryData=payload)

    def payload_schemas(self) -> None:
        comm = (18, "NCCL communicator ID", None)
        for schema, fields in (
            (_INIT, (comm, (5, "No. of ranks", 8), (5, "Rank", 12), (5, "CUDA device", 16))),
            (_COLL, (comm, (22, "Message size [bytes]", 8))),
        ):
            for index, (kind, name, offset) in enumerate(fields):
                self.add(ENTRIES, schemaId=schema, idx=index, type=kind, name=name, offset=offset)

    def write(self, path: Path, *, without: Iterable[tuple[str, str]] = (), types: str = "") -> Path:
        """The file; `without` names (table, column) that this schema does not have, `types` the declared type."""
        without = set(without)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
            db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in self.strings.items()])
            for table, rows in self.rows.items():
                columns = [column for column in _DEFAULTS[table] if (table, column) not in without]
                db.execute("CREATE TABLE " + table + " (" + ", ".join(f'"{c}" {types}' for c in columns) + ")")
                marks = ", ".join("?" * len(columns))
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", [[row[c] for c in columns] for row in rows])
        return path


def edited_export(path: Path, *statements: str) -> Path:
    """A small export, in which these statements were carried out."""
    export = NsysExport()
    export.kernel("nvjet_tst_128x256", 50, 90, launch=(20, 30))
    export.range("aten::mm, op_id = 1, sizes = [[1]]", 10, 40)
    with closing(sqlite3.connect(export.write(path))) as db, db:
        for statement in statements:
            db.execute(statement)
    return path


def _payload(schema: int, fields: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(fields), 32 + len(fields)) + fields
