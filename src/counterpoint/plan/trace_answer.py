"""The answer of `counterpoint plan --from-trace`: a measured step, and the step that it would be elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterpoint.errors import Misconfigured
from counterpoint.plan.from_trace import Observed, elsewhere, observed
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.job_file import parse_job
from counterpoint.plan.networks import all_levels, names
from counterpoint.plan.what_if import edited
from counterpoint.records import Diagnosis
from counterpoint.records.prediction import Prediction

__all__ = ["ALLOWED", "answer_from_trace"]

ALLOWED = ("weak_nodes", "network", "nic_gbit", "nics", "failed_nics", "oversubscription", "slow_rank")
"""What-ifs that a trace can answer: the others would change what each rank computes."""
VALIDATED = (
    "not validated: between hosts nothing was compared yet; 2, 4 and 8 H200 of a host predict each other's FSDP2 step "
    "with a mean error of 0.9%, 1.3% at worst (results/plan-from-trace.md)"
)
ONE_NODE = {"H200": "h100"}  # the same links


def answer_from_trace(diagnosis: Diagnosis, *, recorded_on: str | None, asked: Mapping[str, str]) -> Prediction:
    """The measured step where nothing is asked, else the step as it would be.

    Args:
        diagnosis: of all ranks.
        recorded_on: name of the network; None: NVLink, if all ranks are in one node.
        asked: what-ifs of `ALLOWED`.

    Raises:
        Misconfigured: another what-if, an unknown network or GPU, or a trace that says too little.
    """
    for name in asked:
        if name not in ALLOWED:
            raise Misconfigured(
                f"{name} with --from-trace: a trace can answer {', '.join(ALLOWED)}; give a job instead"
            )
    of = observed(diagnosis)
    tables = _tables(of, recorded_on or _nvlink(of))
    here = parse_job(tables).cluster
    for name, value in asked.items():
        tables = edited(tables, name, value)
    job = parse_job(tables)
    there = elsewhere(of, here, job.cluster, ranks=job.parallel.world_size, slow=job.ranks.slow)
    comm, compute = sum(part.us for part in there.comm), there.parts[0].us
    measured = f"{of.step_us / 1e3:,.1f} ms a step on {of.ranks} × {of.gpu}"
    left_out = [f"{of.left_out} collectives without a known size are left out"] if of.left_out else []
    return Prediction(
        model="trace",
        gpu=of.gpu,
        gpus=job.parallel.world_size,
        step_us=there.step_us,
        parts=tuple(part for part in there.parts if part.us > 0),
        comm=there.comm,
        exposed_comm_us=there.exposed_us,
        comm_to_compute=comm / compute,
        serial_us=there.step_us - there.exposed_us + comm,
        ideal_us=max(there.step_us - there.exposed_us, comm),
        micro_batches=None,
        tokens_per_s=None,
        model_tflops=None,
        mfu=there.mfu,
        memory={},
        memory_available_gib=None,
        fits=None,
        verdict=f"measured: {measured}",
        validated=VALIDATED,
        notes=(
            "compute, copies and idle time of the trace; transfers by the ratio of the model's estimates",
            *left_out,
        ),
        job={},
        asked=dict(asked),
    )


def _tables(of: Observed, network: str) -> dict[str, Any]:
    """A job with as many ranks on that network; what it computes is in the trace."""
    return {
        "model": {"name": "trace", "layers": 1, "hidden": 1, "heads": 1, "vocab": 1},
        "training": {"sequence": 1, "global_batch": of.ranks},
        "parallel": {"dp": of.ranks},
        "cluster": {"gpu": find_gpu(of.gpu).name, "network": network},
    }


def _nvlink(of: Observed) -> str:
    """The network of one node of such GPUs."""
    name = f"nvlink-{ONE_NODE.get(of.gpu, of.gpu.lower())}"
    if name in names() and of.ranks <= all_levels(name)[-1].size:
        return name
    raise Misconfigured(
        f"--recorded-on is missing: name the network of {of.ranks} × {of.gpu}, one of {', '.join(names())}"
    )
