"""Faults of FSDP and DDP, recorded by torch.profiler in trainings of two gloo ranks, are found and named."""

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

import counterpoint
from counterpoint.measurement.session import Session
from tests.support.ranks import Ranks

STEPS = 3


def record(session: Session, kind: str, folder: str) -> None:
    """Train a model whose communication takes about as long as its compute, and export this rank's trace."""
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1000)
    else:
        for layer in model.children() if kind == "units" else ():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/rank{session.rank}.json"),
        record_shapes=True,
    ) as profiler:
        for _ in range(STEPS + 3):
            model(torch.ones(128, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


@pytest.mark.parametrize(
    ("kind", "found", "others"),
    [
        ("one unit", {"fsdp_one_unit"}, {"ddp_buckets", "late_gather"}),
        ("units", set(), {"fsdp_one_unit", "ddp_buckets", "late_gather"}),
        ("ddp", {"ddp_buckets"}, {"fsdp_one_unit", "late_gather"}),
    ],
)
def test_a_recorded_fault_is_found(
    two_ranks: Ranks, tmp_path: Path, kind: str, found: set[str], others: set[str]
) -> None:
    two_ranks.run(record, kind, str(tmp_path))
    diagnosis = counterpoint.diagnose(tmp_path).diagnosis
    kinds = {finding.kind for finding in diagnosis.findings}
    assert found <= kinds, diagnosis
    assert not others & kinds, diagnosis
