"""Builds small Kineto traces: say the values that matter, the rest are those of a plain event.

Events are plain dictionaries, made by one function per kind; `text` spells them in any of the layouts that profilers
write, `write` puts them in a file of a rank. A time may be a `Decimal` where the file's digits matter.
"""

import dataclasses
import gzip
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from counterpoint.trace.kineto import read_kineto
from counterpoint.trace.source import Limits, find_traces
from counterpoint.trace.timeline import Timeline

Event = dict[str, Any]
Time = float | Decimal

PID = 4242
H200 = {
    "id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132, "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472, "maxThreadsPerMultiprocessor": 2048,
}  # fmt: skip
LAYOUTS = ("compact", "pretty", "kineto", "lines", "array")
_encode = msgspec.json.Encoder(decimal_format="number").encode


def event(cat: str, name: str, ts: Time, dur: Time, *, pid: Any = PID, tid: Any = PID, **args: Any) -> Event:
    """A complete event; keyword arguments become its args, `_` read as a space (`External_id`)."""
    spelt = {key.replace("_", " "): value for key, value in args.items() if value is not None}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": spelt}


def kernel(
    name: str, ts: Time, dur: Time, *, stream: int = 7, device: int = 0, correlation: int | None = None,
    external: int | None = None, grid: Any = (132, 1, 1), block: Any = (128, 1, 1),
    more: Mapping[str, Any] | None = None,
) -> Event:  # fmt: skip
    """A kernel; `more` are further args, such as `metadata(...)`."""
    made = event(
        "kernel", name, ts, dur, pid=device, tid=stream, External_id=external, device=device, context=1, stream=stream,
        correlation=correlation, registers_per_thread=168, shared_memory=1024, grid=grid, block=block,
    )  # fmt: skip
    made["args"] |= more or {}
    return made


def copy(name: str, ts: Time, dur: Time, *, stream: int = 7, correlation: int | None = None, size: int = 4096) -> Event:
    """A copy or, if it is so named, a memset: `Memcpy DtoH (Device -> Pinned)`."""
    cat = "gpu_memset" if name.startswith("Memset") else "gpu_memcpy"
    return event(
        cat, name, ts, dur, pid=0, tid=stream, device=0, context=1, stream=stream, correlation=correlation, bytes=size
    )


def runtime(name: str, ts: Time, dur: Time, *, correlation: int, external: int | None = None, tid: Any = PID) -> Event:
    cat = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
    return event(cat, name, ts, dur, tid=tid, External_id=external, cbid=211, correlation=correlation)


def op(
    name: str, ts: Time, dur: Time, *, external: int | None = None, dims: Any = None, types: Any = None,
    values: Any = None, sequence: int | None = None, tid: Any = PID,
) -> Event:  # fmt: skip
    return event(
        "cpu_op", name, ts, dur, tid=tid, External_id=external, Input_Dims=dims, Input_type=types,
        Concrete_Inputs=values, Sequence_number=sequence,
    )  # fmt: skip


def annotation(name: str, ts: Time, dur: Time, *, tid: Any = PID) -> Event:
    """A `record_function` range, ProfilerStep, or what Gloo's threads report (`gloo:all_reduce`)."""
    return event("user_annotation", name, ts, dur, tid=tid)


def stream_wait(ts: Time, *, stream: int, waits_on: int, waits_for: int, correlation: int | None = None) -> Event:
    """cudaStreamWaitEvent as the driver saw it: `stream` waits for the event that call `waits_for` recorded."""
    made = event("cuda_sync", "Stream Wait Event", ts, 0.0, tid=stream, stream=stream, correlation=correlation)
    made["args"] |= {"wait_on_stream": waits_on, "wait_on_cuda_event_record_corr_id": waits_for}
    return made


def metadata(
    op: str, *, ranks: Sequence[int] = (0, 1), group: str = "0", nelems: tuple[int, int] = (1024, 2048),
    dtype: str = "BFloat16", seq: int | None = None, comms_id: int | str | None = None, rank: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The args that describe a collective, on a kernel as on `record_param_comms`; `nelems` are (in, out)."""
    stated = {
        "Collective name": op, "In msg nelems": nelems[0], "Out msg nelems": nelems[1], "Group size": len(ranks),
        "dtype": dtype, "Process Group Name": group, "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(ranks)), "Seq": seq, "Comms Id": comms_id, "Rank": rank,
    }  # fmt: skip
    return {key: value for key, value in stated.items() if value is not None}


def param_comms(ts: Time, dur: Time, *, external: int, more: Mapping[str, Any]) -> Event:
    """c10d's record of a collective on the host; `more` is its `metadata`."""
    made = op("record_param_comms", ts, dur, external=external)
    made["args"] |= more
    return made


def launched(name: str, at: float, dur: float, *, correlation: int, delay: float = 5.0, **more: Any) -> list[Event]:
    call = runtime("cudaLaunchKernel", at, 3.0, correlation=correlation, external=more.get("external"))
    return [call, kernel(name, at + delay, dur, correlation=correlation, **more)]


def training(ranks: int = 2, steps: int = 2, *, rank: int = 0, at: float = 1000.0) -> list[Event]:
    """A few steps of one rank: a matmul, an all-gather beside it, and an instant that carries no time."""
    made: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": at, "args": {"name": "python"}}
    ]
    for number in range(steps):
        t, n = at + 1000.0 * number, 10 * number
        facts = metadata("_allgather_base", ranks=range(ranks), seq=number, rank=rank)
        made += [
            annotation(f"ProfilerStep#{number}", t, 990.0),
            op("aten::mm", t + 10, 20.0, external=n + 1, dims=[[4096, 4096], [4096, 4096]]),
            *launched("nvjet_tst_128x256_NTT", t + 15, 600.0, correlation=n + 1, external=n + 1),
            param_comms(t + 40, 30.0, external=n + 2, more=facts),
            *launched(
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", t + 50, 700.0,
                correlation=n + 2, external=n + 2, stream=20, grid=(24, 1, 1), more=facts,
            ),
            {"ph": "s", "id": n, "pid": PID, "tid": PID, "ts": t + 50, "cat": "ac2g", "name": "ac2g"},
            *launched("void at::native::vectorized_elementwise_kernel<4>", t + 770, 100.0, correlation=n + 3),
        ]  # fmt: skip
    return made


def header(
    *, rank: int | None = 0, world_size: int = 2, devices: Sequence[Mapping[str, Any]] = (H200,), base_ns: int = 10**18
) -> dict[str, Any]:
    """Every key beside the events; `rank` None: without distributedInfo."""
    made: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": list(devices), "baseTimeNanoseconds": base_ns}
    if rank is not None:
        made["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size, "nccl_version": "2.28.9"}
    return made


def spelt_as_in_2020(events: Iterable[Event]) -> list[Event]:
    """The same events as PyTorch 1.8 to 1.12 spelt them: other categories and keys, whole µs, the stream in the tid."""
    cats = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cpu_op": "Operator",
            "cuda_runtime": "Runtime", "cuda_driver": "Runtime"}  # fmt: skip
    made = []
    for e in events:
        if e["ph"] != "X":
            continue
        args = {("external id" if k == "External id" else k): v for k, v in e["args"].items() if k != "stream"}
        tid = f"stream {e['tid']}" if "stream" in e["args"] else e["tid"]
        times = {"ts": round(e["ts"]), "dur": round(e["dur"])}
        made.append(e | times | {"cat": cats.get(e["cat"], e["cat"]), "tid": tid, "args": args})
    return made


def text(
    events: Sequence[Event], head: Mapping[str, Any] | None = None, *, layout: str = "compact",
    events_first: bool = False,
) -> bytes:  # fmt: skip
    """The trace as a profiler would write it: one of LAYOUTS, with its header before or after the events.

    compact: no white space; pretty: indented; kineto: as PyTorch writes it; lines: one event a line; array: the bare
    array, without a header.
    """
    head = header() if head is None else head
    if layout == "array":
        return _encode(list(events))
    if layout in ("compact", "pretty"):
        whole = {"traceEvents": events, **head} if events_first else {**head, "traceEvents": events}
        return _encode(whole) if layout == "compact" else msgspec.json.format(_encode(whole), indent=2)
    between, spell = (b",\n", _encode) if layout == "lines" else (b",\n  ", _kineto_event)
    array = b'"traceEvents": [\n  ' + between.join(spell(e) for e in events) + b"\n]"
    keys = [b"%s: %s" % (_encode(key), _encode(value)) for key, value in head.items()]
    return b"\n{\n  " + b",\n  ".join([array, *keys] if events_first else [*keys, array]) + b"\n}\n"


def _kineto_event(made: Event) -> bytes:
    """PyTorch's lines: what it is, when it was, and its args one a line."""
    first = {key: value for key, value in made.items() if key not in ("ts", "dur", "args")}
    parts = [_encode(first)[1:-1], _encode({k: made[k] for k in ("ts", "dur") if k in made})[1:-1]]
    if "args" in made:
        args = b",\n      ".join(_encode({key: value})[1:-1] for key, value in made["args"].items())
        parts.append(b'"args": {\n      ' + args + b"\n    }")
    return b"{\n    " + b",\n    ".join(parts) + b"\n  }"


def write(path: Path, events: Sequence[Event], head: Mapping[str, Any] | None = None, **layout: Any) -> Path:
    """`text` in a file, compressed if its name ends in .gz; the folder is made."""
    return write_bytes(path, text(events, head, **layout))


def write_bytes(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 1, mtime=0) if path.suffix == ".gz" else content)
    return path


def write_job(folder: Path, ranks: int = 2, **layout: Any) -> Path:
    """The `training` traces of all ranks of a job, `rank0.json` and so on."""
    for rank in range(ranks):
        write(folder / f"rank{rank}.json", training(ranks, rank=rank), header(rank=rank, world_size=ranks), **layout)
    return folder


NASTY = [
    "}, {", '"}, {"', "\\", '\\"}, {\\"', "]}", '"traceEvents": [', "µs 通信 😀", "<b>&amp;</b>", "tab\tnew\nline\x00",
    "",
]  # fmt: skip


SMALL = [kernel("a", 1.0, 2.0, grid=[1, 1, 1]), op("aten::mm", 0.0, 1.0, dims=[[2]])]


def read(path: Path, limits: Limits | None = None) -> Timeline:
    with find_traces([str(path)], limits or Limits()) as (file,):
        return read_kineto(file, limits)[0]


def bomb(path: Path, parts: tuple[bytes, bytes, bytes], repeats: int) -> Path:
    """A gzip file that repeats its middle part."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(parts[0])
        for _ in range(repeats):
            file.write(parts[1])
        file.write(parts[2])
    return path


def plain(timeline: Timeline, *without: str) -> Any:
    """All of a timeline that can be compared: numbers into its tables replaced by what they stand for."""
    tables = {"name": timeline.names, "shape": timeline.shapes, "collective": timeline.collectives,
              "operator": timeline.names, "inputs": timeline.inputs}  # fmt: skip
    whole = dataclasses.asdict(timeline)
    for key in ("path", "names", "shapes", "collectives", "inputs", *without):
        whole.pop(key)
    for kind in ("gpu", "host"):
        for name, column in whole[kind].items():
            if column is None:
                continue
            values = np.nan_to_num(column, nan=-7.0).tolist()
            whole[kind][name] = [tables[name][v] if v >= 0 else None for v in values] if name in tables else values
    return whole


def awkward() -> list[Event]:
    """Events whose names and args hold everything that could be taken for the border of an event."""
    made = training()
    for row, name in enumerate(NASTY):
        made.append(op(name, 3000.0 + row, 0.5, external=100 + row))
        made.append(annotation(name, 3100.0 + row, 0.5) | {"args": {"list": [{"a": name}, {"b": [{}, {}]}], "c": {}}})
        made.append({"ph": "i", "name": name, "ts": 3000.0, "s": "g"})
    return made
