"""Builds dumps of NCCL's flight recorder: say what matters of a call, the rest is that of a plain one."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

TRAINER = {"name": "train", "filename": "/job/train.py", "line": 31}
TORCH = {"name": "all_reduce", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 2696}


def call(
    seq: int, operation: str = "all_reduce", state: str = "completed", *, group: str = "0", desc: str = "default_pg",
    size: Sequence[int] = (1024,), dtype: str = "Float", p2p: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "frames": [TORCH, TRAINER], "record_id": seq, "pg_id": int(group) if group.isdigit() else 7,
        "process_group": (group, desc), "thread_name": "pt_main", "thread_id": "1",
        "collective_seq_id": 0 if p2p else seq, "p2p_seq_id": seq if p2p else 0, "op_id": seq,
        "profiling_name": f"nccl:{operation}", "time_created_ns": 1_790_000_000_000_000_000 + seq,
        "input_sizes": [list(size)], "input_dtypes": [dtype], "output_sizes": [list(size)], "output_dtypes": [dtype],
        "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": 600_000, "is_p2p": p2p,
    }  # fmt: skip


def dump(
    entries: Sequence[dict[str, Any]], groups: Mapping[str, tuple[str, Sequence[int]]], **more: Any
) -> dict[str, Any]:
    config = {name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for name, (desc, ranks) in groups.items()}
    numbered = [entry | {"record_id": i} for i, entry in enumerate(entries)]
    return {
        "version": "2.10", "pg_config": config, "comm_lib_version": "2.28.9", "pg_status": {}, "entries": numbered,
        **more,
    }  # fmt: skip


def write(folder: Path, dumps: dict[int, dict[str, Any]], *, json: bool = False) -> Path:
    """Write a file for each rank, named as torch names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in dumps.items():
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(msgspec.json.encode(content) if json else pickle.dumps(content, protocol=2))
    return folder


def old_dump(entries: Sequence[dict[str, Any]], groups: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """What one rank of torch 2.3 writes (version 1.4): groups have numbers only, all calls one sequence, no dtypes."""
    kept = ("frames", "record_id", "pg_id", "op_id", "profiling_name", "time_created_ns", "input_sizes", "output_sizes",
            "state", "time_discovered_started_ns", "time_discovered_completed_ns", "retired")  # fmt: skip
    made = [{key: e[key] for key in kept} | {"seq_id": e["collective_seq_id"] + e["p2p_seq_id"]} for e in entries]
    return {"entries": made, "version": "1.4", "pg_config": {name: list(ranks) for name, ranks in groups.items()}}
