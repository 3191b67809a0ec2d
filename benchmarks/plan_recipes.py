"""Compare the recipes that NVIDIA published for H100 with what a search finds for the same model, batch and GPUs.

    python benchmarks/plan_recipes.py                 # every recipe, results/plan-recipes.{json,md} (20 minutes)
    python benchmarks/plan_recipes.py --only 70B      # those whose name has this in it

Memory is a limit for both: where a recipe is predicted not to fit (it did), the search gets as much as it takes.
A recipe is in the space if the search finds it once its axes are fixed; its rank counts the ways that are faster.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace
from plan_published import PUBLISHED, ROOT, Row, read_source
from provenance import provenance, write_result
from tables import print_table

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.job import Job, job_toml
from counterpoint.plan.search.search import search
from counterpoint.plan.step.step import predict_step
from counterpoint.records.prediction import PlanOutcome
from counterpoint.rendering.plan_tables import setting, varying

SOURCES = ("nemo-h100-2024-12", "megatron-bridge-h100", "nemo-h100-long-2024-12", "megatron-lm-h100-2024-07")
COLUMNS = ("recipe", "its step, ms", "best found, ms", "gained", "in the space", "rank", "CPU s", "best")
RANKED = 20  # ways that are listed to find the recipe among them


class Found(NamedTuple):
    """Holds a recipe and what the search found."""

    name: str
    recipe_us: float
    best: PlanOutcome
    in_space: bool
    rank: int | None  # None: not among the first RANKED
    cpu_s: float


def recipes(only: str) -> list[Row]:
    """Return the rows of NVIDIA's sources, one for each recipe that was measured several times."""
    found: dict[str, Row] = {}
    for source in SOURCES:
        for row in read_source(PUBLISHED / f"{source}.toml"):
            if isinstance(row, Row) and only in row.name:
                found.setdefault(job_toml(row.job), row)
    return list(found.values())


def us(choice: PlanOutcome) -> float:
    """Return the step of a choice, which has one."""
    return choice.step_us or math.inf


def fixed_to(job: Job) -> dict[str, tuple[Any, ...]]:
    """Return the axes of a search, all fixed to what the job has."""
    parallel, training = job.parallel, job.training
    layers: str | tuple[int, ...] = "ends" if parallel.ends_count else parallel.stage_layers or "equal"
    names = ("dp", "tp", "cp", "pp", "virtual", "schedule", "ep", "zero", "shard")
    fixed: dict[str, tuple[Any, ...]] = {name: (getattr(parallel, name),) for name in names}
    return fixed | {
        "stage_layers": (layers,),
        "micro_batch": (training.micro_batch,),
        "recompute": (training.recompute,),
    }


def compare(row: Row) -> Found:
    """Search for the job of a recipe, with the recipe's memory."""
    step = predict_step(row.job)
    need = step.memory.total_gib
    gpu = replace(row.job.cluster.gpu, memory_gib=max(row.job.cluster.gpu.memory_gib, need * (1 + 1e-9)))
    job = replace(row.job, cluster=replace(row.job.cluster, gpu=gpu))
    try:
        in_space = us(search(job, best=1, fixed=fixed_to(job)).choices[0]) <= step.step_us * (1 + 1e-9)
    except Misconfigured:
        in_space = False
    start = time.process_time()
    choices = search(job, best=RANKED).choices
    cpu_s = time.process_time() - start
    faster = sum(us(choice) < step.step_us * (1 - 1e-9) for choice in choices)
    return Found(row.name, step.step_us, choices[0], in_space, faster + 1 if faster < RANKED else None, cpu_s)


def line(found: Found) -> list[str]:
    """Return the row of the table."""
    settings = found.best.settings
    return [
        found.name, f"{found.recipe_us / 1e3:,.1f}", f"{us(found.best) / 1e3:,.1f}",
        f"{1 - us(found.best) / found.recipe_us:.1%}", "yes" if found.in_space else "no",
        str(found.rank or f"> {RANKED}"), f"{found.cpu_s:.1f}",
        ", ".join(f"{name.partition('.')[2]} {setting(settings[name])}" for name in varying([found.best])),
    ]  # fmt: skip


def main() -> None:
    """Search for every recipe, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="recipes whose name has this in it")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "plan-recipes.json")
    args = parser.parse_args()
    lines = [line(compare(row)) for row in recipes(args.only)]
    print_table(COLUMNS, lines, width=140)
    rows = [dict(zip(COLUMNS, each, strict=True)) for each in lines]
    write_result(args.out, {"provenance": provenance(("counterpoint",)), "rows": rows}, COLUMNS, lines)


if __name__ == "__main__":
    main()
