"""Define what the parent of a rehearsal asks of its ranks, and where they leave what they saw. No torch."""

from __future__ import annotations

from pathlib import Path

from counterpoint.records import Record

TASK_VARIABLE = "COUNTERPOINT_REHEARSAL_TASK"  # names the file of the task


class RehearsalTask(Record, frozen=True, kw_only=True):
    """Tells a rank where it is: `gpus` are the entries of CUDA_VISIBLE_DEVICES to share; none: CPUs."""

    folder: str
    world_size: int
    ranks_per_host: int
    gpus: tuple[str, ...]


def report_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its `RankReport`."""
    return folder / "reports" / f"rank{rank}.json"
