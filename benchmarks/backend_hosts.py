"""Collectives of backend `counterpoint` over two hosts, which are halves of this machine's GPUs, beside NCCL.

    torchrun --nproc-per-node 8 benchmarks/backend_hosts.py --out results/backend-hosts.json
    torchrun --nproc-per-node 4 benchmarks/backend_hosts.py --device cpu --mib 0.1 --rounds 2

Ours moves data by copy engines within a half, and by NCCL between both. NCCL may take neither NVLink nor shared memory,
within a half as little as between them, so that all of its bytes go through the network of the machine.

Values are small whole numbers, whose sums are exact in any order: it ends where an element is wrong. Calls of both
take turns; median over rounds of a rank, maximum over ranks; the first round is dropped. `times` is NCCL's time over
ours. On CPUs gloo takes the place of NCCL, and threads that of copy engines.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_rig import finish, formatted, in_turns, start

import counterpoint
import counterpoint.torch_backend as backend
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions

__all__ = ["NO_FAST_PATH", "OPERATIONS", "Case"]

NO_FAST_PATH = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
COLUMNS = ("operation", "MiB", "path", "torch ms", "ours ms", "times")


def values(numel: int, rank: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, which add up exactly in any order and dtype."""
    return ((torch.arange(numel, device=device) * (rank + 1) + rank) % 7).to(dtype)


class Case:
    """One operation of one size in a group: its tensors, the call, and what must come out.

    Args:
        name: of the operation.
        num_bytes: of the full array.
        dtype: of elements.
        device: of this rank.
        group: None: the default one.
    """

    def __init__(self, name: str, num_bytes: int, dtype: torch.dtype, device: torch.device, group: Any = None) -> None:
        self.name, self.group = name, group
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        numel = num_bytes // dtype.itemsize // n * n
        everyone = [values(numel, one, device, dtype) for one in range(n)]
        block = numel // n
        mine = everyone[rank]
        self.input: torch.Tensor | None
        if name == "all_gather":
            self.input, self.output = mine[:block].clone(), mine.new_empty(numel)
            self.wanted = torch.cat([one[:block] for one in everyone])
        elif name == "all_to_all":
            self.input, self.output = mine.clone(), mine.new_empty(numel)
            self.wanted = torch.cat([one[rank * block : (rank + 1) * block] for one in everyone])
        elif name == "reduce_scatter":
            self.input, self.output = mine.clone(), mine.new_empty(block)
            self.wanted = torch.stack(everyone).sum(0, dtype=dtype)[rank * block : (rank + 1) * block]
        else:
            self.input = self.output = mine.clone()
            self.wanted = everyone[n - 1] if name == "broadcast" else torch.stack(everyone).sum(0, dtype=dtype)

    def start(self, async_op: bool = False) -> Any:
        """Make the call."""
        assert self.input is not None
        if self.name == "all_gather":
            return torch_function("all_gather")(self.output, self.input, self.group, async_op)
        if self.name == "all_to_all":
            return dist.all_to_all_single(self.output, self.input, group=self.group, async_op=async_op)
        if self.name == "reduce_scatter":
            function = torch_function("reduce_scatter")
            return function(self.output, self.input, dist.ReduceOp.SUM, self.group, async_op)
        if self.name == "broadcast":
            return dist.broadcast(self.output, dist.get_world_size(self.group) - 1, self.group, async_op)
        return dist.all_reduce(self.output, dist.ReduceOp.SUM, self.group, async_op)

    def wrong(self) -> torch.Tensor:
        """Return how many elements are not what they must be, found on the current stream."""
        return (self.output != self.wanted).sum()


def timed(args: argparse.Namespace, name: str, num_bytes: int, device: torch.device, ours: Any) -> dict[str, Any]:
    """Return the row of an operation and a size; raise RuntimeError where an element is wrong."""
    cases = {
        way: Case(name, num_bytes, torch.bfloat16, device, group) for way, group in (("torch", None), ("ours", ours))
    }
    for way, case in cases.items():
        case.start()
        if count := int(case.wrong()):
            raise RuntimeError(f"{name} of {num_bytes} bytes by {way}: {count} elements are wrong")
    steps = {way: partial(case.start) for way, case in cases.items()}
    times = in_turns(steps, device, rounds=args.rounds, steps_each=args.steps)
    paths = {row.path for row in counterpoint.report(ours).calls if row.operation == name}
    row = {"operation": name, "mib": num_bytes / (1 << 20), "path": ", ".join(sorted(paths))}
    return row | {f"{way}_ms": ms for way, (ms, _) in times.items()} | {"times": times["torch"][0] / times["ours"][0]}


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as printed, in the order of `COLUMNS`."""
    formats = {"operation": "", "mib": "g", "path": "", "torch_ms": ".2f", "ours_ms": ".2f", "times": ".2f"}
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[1.0, 16.0, 64.0, 256.0], help="of the full array")
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="calls of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    os.environ.update(NO_FAST_PATH)
    device = start(args.device)
    size = dist.get_world_size()
    if size < 4 or size % 2:
        raise SystemExit(f"{size} ranks: two hosts of several ranks each need 4, 6, 8, ...")
    options = backend.BackendOptions(
        ranks_per_host=size // 2,
        crossover_bytes=dict.fromkeys(OPERATIONS, 0),
        communicator=CommunicatorOptions(timeout_s=120.0),
    )
    ours = dist.new_group(backend="counterpoint", pg_options=options)
    sizes = [round(mib * (1 << 20)) for mib in args.mib]
    rows = [timed(args, name, num_bytes, device, ours) for name in args.operations for num_bytes in sizes]
    finish(args, device, rows, [list(COLUMNS), *map(cells, rows)])


if __name__ == "__main__":
    main()
