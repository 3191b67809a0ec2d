"""Dumps that torch itself writes, of Gloo, in a job in which one rank stops."""

import subprocess
import sys
from pathlib import Path

from counterpoint.diagnosis.hang import diagnose_hang
from counterpoint.trace.flight_recorder import find_dumps

RANK = """
import os, sys, time
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
t = torch.ones(4)
def train():
    for _ in range(3):
        dist.all_reduce(t)
    if rank < 2:
        dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
    dist.broadcast(t, 0)
    return dist.all_reduce(t, async_op=True) if rank != 1 else None
work = train()
time.sleep(0.5)
for name, dump in (("pickle", c10d._dump_fr_trace), ("json", c10d._dump_fr_trace_json)):
    with open(f"{folder}/{name}/trace_rank_{rank}", "wb") as file:
        file.write(dump())
open(f"{folder}/done{rank}", "w").close()
while not all(os.path.exists(f"{folder}/done{r}") for r in range(3)):
    time.sleep(0.05)
os._exit(0)
"""


def test_the_rank_that_stops_is_named(tmp_path: Path) -> None:
    """From pickles, with the line of its last call, and from JSON; what has ended is known although Gloo never says."""
    for name in ("pickle", "json"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", RANK]
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100", "PATH": ""}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    for name, called in (("pickle", " (called in train (<string>:14))"), ("json", "")):
        found = diagnose_hang(find_dumps([str(tmp_path / name)]))
        assert found.verdict == (
            f"Rank 1 has not entered all_reduce #5 of group 0 (default_pg) after broadcast #4{called}; "
            "ranks 0, 2 wait for it."
        )
        assert [(s.rank, s.scheduled, s.completed) for s in found.groups[0].states] == [(0, 5, 4), (1, 4, 4), (2, 5, 4)]
