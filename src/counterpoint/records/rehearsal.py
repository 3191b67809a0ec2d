"""Define the record that `counterpoint rehearse` prints about a script.

`Rehearsal` is the contract `counterpoint.rehearsal/1`: keys may be added, never renamed. Sizes are bytes.
"""

from __future__ import annotations

from typing import Literal

from counterpoint.records import Record

SCHEMA = "counterpoint.rehearsal/1"


class RankReport(Record, frozen=True, kw_only=True):
    """Holds the report that one rank writes at the end of its script."""

    rank: int  # number of the rank
    steps: int  # optimizer steps; of several optimizers at a time, those of the first
    peak_bytes: int  # most memory that torch reserved on its GPU; 0 on CPUs
    reports: dict[
        str, str
    ]  # what counterpoint reports of each model and group, by name: `print(overlapped)` and the like
    calls: dict[
        str, int
    ]  # calls of each process group of torch, by name, as torch counts them: with gloo, messages, too
    members: dict[str, tuple[int, ...]]  # ranks of each of these groups


class RehearsalReport(Record, frozen=True, kw_only=True):
    """Holds one report and all ranks that wrote it; `text` is empty for ranks without a report of that name."""

    name: str
    ranks: tuple[int, ...]
    text: str


class Rehearsal(Record, frozen=True, kw_only=True):
    """Holds the whole answer of `counterpoint rehearse`."""

    schema: str = SCHEMA
    command: str  # as it was given
    device: Literal["cuda", "cpu"]  # of the ranks
    gpus: tuple[str, ...]  # names of the GPUs that the ranks shared; empty on CPUs
    world_size: int  # number of ranks
    hosts: int  # number of hosts that the ranks were divided among
    steps: int  # of the optimizer, on the rank that made fewest
    peak_bytes: int  # most memory that torch reserved for one rank
    reports: tuple[RehearsalReport, ...]  # what counterpoint replaced and moved; equal reports are merged
    differences: tuple[str, ...]  # what was not the same on all ranks of a group, in sentences
    missing_ranks: tuple[int, ...]  # ranks that left no report, as a script does that ends by `os._exit`
    verdict: str  # what this shows, in a sentence, and what it cannot show
