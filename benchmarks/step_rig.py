"""Start the ranks of a benchmark of training steps, time its steps, and keep what it measured."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from provenance import gpu_provenance, provenance, write_result

from counterpoint.parallel.report import aligned_rows

__all__ = ["NO_MULTICAST", "Step", "block", "formatted", "in_turns", "origin", "show", "start", "synchronize", "write"]

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
Step = Callable[[], Any]
Key = TypeVar("Key")


def start(kind: str) -> torch.device:
    """Make the default group of this job, by NCCL or gloo, and return this rank's device; `kind` is cuda or cpu."""
    os.environ.update(NO_MULTICAST)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Bring all ranks, GPUs included, to one moment."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block(step: Step, device: torch.device, steps: int) -> tuple[float, float]:
    """Return ms of a step within several, and of the host for the first of them; one before is not timed."""
    step()
    synchronize(device)
    started = time.perf_counter()
    step()
    host_ms = (time.perf_counter() - started) * 1e3
    for _ in range(steps - 1):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3 / steps, host_ms


def in_turns(
    steps: Mapping[Key, Step], device: torch.device, *, rounds: int, steps_each: int
) -> dict[Key, tuple[float, float]]:
    """Return ms of a step and of the host of each variant: medians over rounds of blocks, maxima over ranks.

    Args:
        steps: a step of each variant; they take turns, and one round before is dropped.
        device: of this rank.
        rounds: blocks of each variant.
        steps_each: of a block.
    """
    found: dict[Key, list[tuple[float, float]]] = {key: [] for key in steps}
    for index in range(rounds + 1):
        for key, step in steps.items():
            seen = block(step, device, steps_each)
            if index:
                found[key].append(seen)
    mine = [tuple(median(column) for column in zip(*times, strict=True)) for times in found.values()]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    slowest = [tuple(max(column) for column in zip(*times, strict=True)) for times in zip(*ranks, strict=True)]
    return {key: (ms, host_ms) for key, (ms, host_ms) in zip(found, slowest, strict=True)}


def formatted(row: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """Return the cells of a row, by the format of each name; empty where it has no value."""
    return ["" if row.get(name) is None else format(row[name], how) for name, how in formats.items()]


def show(table: Sequence[Sequence[str]]) -> None:
    """Print a table in aligned columns."""
    print("\n".join(aligned_rows(table)), flush=True)


def finish(args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]], table: list[list[str]]) -> None:
    """Print the table on rank 0, write it with its rows where `--out` says, and leave the group."""
    if dist.get_rank() == 0:
        show(table)
        if args.out is not None:
            write(args.out, args, rows, table, [])
    synchronize(device)
    dist.destroy_process_group()


def origin(kind: str, world_size: int) -> dict[str, Any]:
    """Return where a result of so many ranks comes from; `kind` is cuda or cpu."""
    packages = ["torch", "triton", "cuda-bindings", "nvidia-nccl-cu13"]
    facts = gpu_provenance(packages, world_size=world_size) if kind == "cuda" else provenance(packages)
    return facts | {"torch": torch.__version__, "world_size": world_size, "environment": NO_MULTICAST}


def write(
    path: Path,
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    table: Sequence[Sequence[str]],
    report: Sequence[str],
) -> None:
    """Write JSON with where it came from, and beside it the table, whose first row names the columns."""
    facts = origin(args.device, dist.get_world_size())
    options = {name: value for name, value in vars(args).items() if name != "out"}
    record = {"provenance": facts, "options": options, "rows": rows, "report": list(report)}
    write_result(path, record, table[0], table[1:])
