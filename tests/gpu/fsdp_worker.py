"""One rank of test_fsdp.py: trains a small model on real GPUs by torch's collectives and by ours.

Started by path, with the environment that torchrun would give and one argument: the file for rank 0's answer.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from counterpoint.measurement.session import Session
from tests.dist.tuned_programs import MIXED, choice, followed_by, tuning
from tests.support.fsdp_training import BF16, CASES, Case, batch, beside_stock, differences, overlapped, stock_trained
from tests.support.gpu_ranks import are_shared, free_bytes

EAGER = {name: case for name, case in CASES.items() if case.compiled is None}
STEPS = 300


def cases(session: Session) -> dict[str, Case]:
    """Those of the CPU tests, and the compiler for GPUs."""
    named = EAGER | {"compiled": Case(policy=BF16, compiled=torch.compile)}
    mesh = (session.world_size,)
    return {name: dataclasses.replace(case, device="cuda", mesh=mesh) for name, case in named.items()}


def beside(session: Session, case: Case) -> dict[str, list[str]]:
    """What differs from stock beyond what differs between two runs of stock; what was not in place; that noise."""
    first, second = (stock_trained(session, case) for _ in range(2))
    noise = differences(first, second)
    ours, wrong = beside_stock(session, case)
    return {"ours": sorted({*ours} - {*noise}), "wrong": wrong, "noise": noise}


def kernels(session: Session) -> list[str]:
    """Of NCCL, in two steps of an overlapped model; or that no copy between GPUs was seen, if ranks have their own."""
    with overlapped(Case(policy=BF16, device="cuda", mesh=(session.world_size,))) as (model, _):
        for _ in range(2):
            model(*batch(session, 0)).backward()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(2):
                model(*batch(session, 0)).backward()
            torch.cuda.synchronize()
    names = [event.key for event in profiler.key_averages()]
    copies = are_shared() or any("PtoP" in name for name in names)
    return sorted({name for name in names if "nccl" in name.lower()}) + ["no copy between GPUs"] * (not copies)


def growth(session: Session) -> dict[str, int]:
    """Bytes of device memory that steps after the first tenth of all take."""
    with overlapped(Case(policy=BF16, device="cuda", mesh=(session.world_size,))) as (model, _):
        seen = []
        for step in range(STEPS):
            model(*batch(session, 0)).backward()
            model.zero_grad(set_to_none=True)
            if step in (STEPS // 10, STEPS - 1):
                torch.cuda.synchronize()
                seen.append(free_bytes(session.device))
    return {"bytes": seen[0] - seen[1]}


def tuned(session: Session, case: Case) -> dict[str, Any]:
    """What differs from stock where each layer leaves something else to NCCL, beyond stock's own noise; the report."""
    first, second = (stock_trained(session, case) for _ in range(2))
    ours, report = followed_by(session, case, tuning(*MIXED, device="cuda"))
    return {"ours": sorted({*ours} - {*differences(first, second)}), "report": str(report)}


def limited(session: Session, case: Case) -> list[str]:
    """What the report says of a limit of SMs that all choices have in common, and the SMs of matmuls after it."""
    sms = torch.cuda.get_device_properties(session.device).multi_processor_count
    choices = tuning(choice("all_gather", f"zero_sm+gemm_sms={sms - 8}", where=("layers.*",)), device="cuda")
    report = followed_by(session, case, choices)[1].tuned
    return [report, f"carve-out of {torch._C._get_sm_carveout_experimental() or 0} SMs"]


def main(answer: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    session = Session("cuda")
    mine: dict[str, Any] = {}
    with sdpa_kernel(SDPBackend.MATH):  # the others add up in any order
        for name, case in cases(session).items():
            started = time.monotonic()
            mine[name] = beside(session, case)
            if session.rank == 0:
                print(f"{name}: {time.monotonic() - started:.1f} s, {mine[name]}", flush=True)
        chosen = Case(policy=BF16, device="cuda", mesh=(session.world_size,))
        mine |= {"tuned": tuned(session, chosen), "limited": limited(session, chosen)}
    mine |= {"kernels": kernels(session), "growth": growth(session)}
    ranks = session.gather(mine)
    if session.rank == 0:
        answer.write_bytes(msgspec.json.encode(ranks))
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
