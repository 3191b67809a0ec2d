"""The measured steps that a job resembles, and how far the model was off there (`benchmarks/plan_published.py`).

A job resembles a group of rows if it is of the same GPU and within their ranks, and is divided and computed in the same
manner. A job that resembles none is not validated, and `validated` says how it differs from the closest.
"""

from __future__ import annotations

from counterpoint.plan.job.job import Job
from counterpoint.records.base import Record

__all__ = ["VALIDATIONS", "Validation", "validated"]


class Validation(Record, frozen=True, kw_only=True):
    """Holds the error of the model on rows that were compared."""

    rows: str  # their number and source, for people
    gpu: str  # of all of them
    ranks: tuple[int, int]  # least and most
    sharded: bool  # parameters are sharded (zero 3)
    mesh: tuple[str, ...]  # axes that have more than one rank in some row
    ways: dict[str, bool]  # fields of Training and Parallel that were the same in all rows
    mechanisms: tuple[str, ...] = ("nccl",)  # of overlap
    mean: float  # of |predicted / published - 1| of the step's time
    worst: float  # the largest of them
    fitted: bool = False  # constants were fitted to the rows

    def differs(self, job: Job) -> list[str]:
        """Return how this job differs from the rows; it resembles them if the list is empty."""
        parallel, training = job.parallel, job.training
        least, most = self.ranks
        used = {name for name in ("dp", "tp", "pp", "cp", "ep") if getattr(parallel, name) > 1}
        checks = {
            f"GPU {job.cluster.gpu.name}, not {self.gpu}": job.cluster.gpu.name != self.gpu,
            f"{parallel.world_size} ranks, not {least} to {most}": not least <= parallel.world_size <= most,
            f"zero = {parallel.zero}": (parallel.zero == 3) != self.sharded,
            f"axes {', '.join(sorted(used - set(self.mesh)))}": not used <= set(self.mesh),
            "experts": job.model.experts is not None,
            f"mechanism {job.mechanism}": job.mechanism not in self.mechanisms,
            f"precision {training.precision}": training.precision not in ("bf16", "fp16"),
            "compressed gradients": job.compression is not None,
            f"local_steps = {training.local_steps}": training.local_steps > 1,
            "asynchronous replicas": training.asynchronous,
            "a slow rank": job.ranks.slow > 1,
        }
        for name, value in self.ways.items():
            mine = getattr(training if name in training.__struct_fields__ else parallel, name)
            checks[f"{name} = {str(mine).lower()}"] = mine != value
        return [what for what, wrong in checks.items() if wrong]


VALIDATIONS = (
    Validation(
        rows="24 steps of Megatron-LM (arXiv 2104.04473, 2205.05198)", gpu="A100", ranks=(8, 3072),
        sharded=False, mesh=("dp", "tp", "pp"), ways={"flash_attention": False, "fused_kernels": True},
        mean=0.017, worst=0.044, fitted=True,
    ),
    Validation(
        rows="7 steps of FSDP with MPT models (MosaicML llm-foundry)", gpu="A100", ranks=(8, 64),
        sharded=True, mesh=("dp",), ways={"flash_attention": True, "fused_kernels": False, "overlap_dp": True},
        mean=0.071, worst=0.105,
    ),
    Validation(
        rows="3 steps of Llama 3 405B (arXiv 2407.21783)", gpu="H100", ranks=(8192, 16384),
        sharded=False, mesh=("dp", "tp", "pp", "cp"),
        ways={"flash_attention": True, "fused_kernels": False, "fused_accumulation": False, "overlap_tp": False},
        mean=0.042, worst=0.069,
    ),
    Validation(
        rows="47 steps of FSDP2 with layers of Llama 3 (this project, 2, 4 and 8 × H200)", gpu="H200", ranks=(1, 8),
        sharded=True, mesh=("dp",), ways={"flash_attention": True, "fused_kernels": False, "overlap_dp": True},
        mechanisms=("nccl", "zero_sm", "zero_sm_copied"), mean=0.082, worst=0.155,
    ),
)  # fmt: skip


def validated(job: Job) -> str:
    """Return one line: the error on rows like the job, or "not validated" and how it differs from the closest."""
    closest = min(VALIDATIONS, key=lambda each: len(each.differs(job)))
    error = f"mean {closest.mean:.1%}, worst {closest.worst:.1%}"
    if differs := closest.differs(job):
        return f"not validated: {'; '.join(differs)}; the closest measured are {closest.rows}: {error}"
    fitted = "; 18 of them were fitted" if closest.fitted else "; nothing was fitted to them"
    return f"{error} on {closest.rows}{fitted}"
