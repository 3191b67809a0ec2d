"""Define what `counterpoint tune --run` asks of the ranks of a script, and what they answer. No torch.

The parent writes a `ScriptTask` into a folder and names its file in the environment; rank 0 writes a `ScriptResult`
beside it, and a rank that fails a `RankFailure` into `errors/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.records import Record

TASK_VARIABLE = "COUNTERPOINT_TUNING_TASK"
OverlapCalls = Literal["never", "switched", "fixed"]
"""Whether the script calls `counterpoint.overlap`, and if so, whether that can be taken back between steps."""


class ScriptVariant(Record, frozen=True, kw_only=True):
    """Describes one way to run the script's steps."""

    name: str  # "stock", "tuned"
    file: str | None  # of the choices that `overlap` follows; None: torch's collectives


class ScriptTask(Record, frozen=True, kw_only=True):
    """Asks the ranks to record some steps, or to run variants in turns and time them."""

    folder: str
    variants: tuple[ScriptVariant, ...] = ()  # none: record
    recorded_steps: int = 2
    warmup_steps: int = 3  # before all else: memory, compilation
    dropped_steps: int = 2  # after a change of variant: the first opens communicators, the second prepares calls
    block_steps: int = 4  # timed as one
    rounds: int = 20  # at most, of one block for each variant
    min_rounds: int = 5
    budget_s: float = 60.0  # no round begins that would end later

    @property
    def needed_steps(self) -> int:
        """Return the optimizer steps that the script has to make at least."""
        if not self.variants:
            return self.warmup_steps + 1 + self.recorded_steps
        return self.warmup_steps + self.min_rounds * len(self.variants) * (self.dropped_steps + self.block_steps)


class ScriptResult(Record, frozen=True, kw_only=True):
    """Holds what the ranks found out."""

    overlap: OverlapCalls
    device: Literal["cuda", "cpu"]
    world_size: int
    blocks_us: tuple[tuple[float, ...], ...] = ()  # [variants, rounds], µs of a step of the slowest rank
    followed: dict[str, str] = msgspec.field(default_factory=dict)  # by variant: how many of its choices had effect


def task_file(folder: Path) -> Path:
    """Return where the task is."""
    return folder / "task.json"


def result_file(folder: Path) -> Path:
    """Return where rank 0 writes its result."""
    return folder / "result.json"


def alive_file(folder: Path) -> Path:
    """Return the file that rank 0 touches after each step."""
    return folder / "alive"


def failure_file(folder: Path, rank: int) -> Path:
    """Return where a rank says why it failed."""
    return folder / "errors" / f"rank{rank}.json"


def process_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes the number of its process."""
    return folder / "processes" / str(rank)


def stack_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes the stacks of its threads if it is told to end."""
    return folder / f"stacks{rank}.log"


def write_whole(path: Path, record: Record) -> None:
    """Write a record as JSON, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(record))
    part.replace(path)
