"""Rank results of searches by an objective, mark their Pareto front, and say why each choice is not the best.

    step       µs of a step
    cost       GPU-µs of a step, with its share of what failures and checkpoints lose
    goodput    µs of a step, with that share

All results have one batch and one price, so these rank tokens, money and useful tokens per hour alike. On one number of
GPUs the time lost to failures and checkpoints grows with the step (goodput.py): the fastest choice is the best by all
three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.job import Job
from counterpoint.records.prediction import OBJECTIVES, Objective, PartChange, PlanOutcome, SearchResult


def check_objective(objective: str, job: Job, counts: Sequence[int | None]) -> Objective:
    """Return the objective; raise Misconfigured if it is unknown, or would rank choices as the step time does."""
    if objective not in OBJECTIVES:
        raise Misconfigured(f"--objective {printable(objective, 80)}: give one of {', '.join(OBJECTIVES)}")
    if objective != "step" and len(set(counts)) < 2:
        raise Misconfigured(
            f"--objective {objective}: the fastest way on one number of GPUs is the best by it; give more by --gpus"
        )
    if objective == "goodput" and not (job.run and (job.run.gpu_mtbf_hours or job.run.node_mtbf_hours)):
        raise Misconfigured(
            "--objective goodput: nothing fails; give run.tokens, and run.gpu_mtbf_hours or run.node_mtbf_hours"
        )
    return objective


def ranked(results: Sequence[SearchResult], objective: Objective) -> tuple[SearchResult, ...]:
    """Return the results sorted by their best choices, each choice with its difference from the best of all."""
    found = sorted(results, key=lambda it: sum(_taken(it.choices[0], objective).values()) if it.choices else inf)
    first = found[0].choices[0]
    front = _front(choice for each in found for choice in each.choices)

    def compared(choice: PlanOutcome) -> PlanOutcome:
        more = None if choice is first else _most_added(_taken(choice, objective), _taken(first, objective))
        return replace(choice, on_front=_figures(choice) in front, more=more)

    return tuple(
        replace(each, objective=objective, choices=tuple(compared(choice) for choice in each.choices)) for each in found
    )


def _taken(choice: PlanOutcome, objective: Objective) -> dict[str, float]:
    """Return a choice's µs per step (GPU-µs for "cost"), by part of the step and by loss to failures or checkpoints."""
    found = dict(choice.parts)
    if objective != "step" and choice.run is not None:
        whole_us = sum(found.values()) / choice.run.goodput
        found |= {loss.name: whole_us * loss.days / choice.run.days for loss in choice.run.losses}
    return {name: us * (choice.gpus or 1) for name, us in found.items()} if objective == "cost" else found


def _most_added(taken: Mapping[str, float], first: Mapping[str, float]) -> PartChange | None:
    """Return the part of a step in which a choice exceeds the best choice most; None if no part is longer."""
    change, name = max((taken[name] - first.get(name, 0.0), name) for name in taken)
    return PartChange(name=name, change=change / sum(first.values())) if change > 0.0 else None


def _figures(choice: PlanOutcome) -> tuple[float, ...]:
    return choice.gpus or 0, choice.step_us or 0.0, choice.memory_gib or 0.0


def _front(choices: Iterable[PlanOutcome]) -> set[tuple[float, ...]]:
    """Return (GPUs, step, memory) of the choices on the Pareto front: no other choice needs as little of all three."""
    front: list[tuple[float, ...]] = []
    for each in sorted(set(map(_figures, choices))):  # a choice that is nowhere larger than another comes before it
        if not any(all(have <= want for have, want in zip(kept, each, strict=True)) for kept in front):
            front.append(each)
    return set(front)
