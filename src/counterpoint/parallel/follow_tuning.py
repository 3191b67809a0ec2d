"""Run calls as `counterpoint tune` chose in `counterpoint.toml`, which must be equal on all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.collectives.host.group import gather_values
from counterpoint.controls.gemm_sms import GemmSmLimit
from counterpoint.controls.parse import VARIABLES
from counterpoint.errors import Misconfigured, printable
from counterpoint.records.measurement import Environment
from counterpoint.records.tuning import Tuned, TunedPair
from counterpoint.tuned.choices import Choices, mechanism_base, mechanism_knobs, stays_with_torch
from counterpoint.tuned.file import read_tuned, tuned_digest
from counterpoint.version import VERSION

VARIABLE = "COUNTERPOINT_TUNED"
OFF = "off"
"""Is given in place of a file's name to say that no tuning is followed."""
_GEMM_SMS = "gemm_sms"
_AXES = 4  # most axes of a mesh: replicated, sharded, tensor and expert parallel


@dataclass(frozen=True, kw_only=True)
class TunedCall:
    """Holds the mechanism that a tuning chose for a collective call.

    Args:
        mechanism: name of the mechanism, without its settings (knobs).
        stays: torch runs the call by its own collective.
        why: what was chosen, why, and which of its knobs are not applied.
    """

    mechanism: str
    stays: bool
    why: str


class FollowedTuning:
    """Looks up a tuning's choice for each call, and remembers which choices were used.

    Args:
        choices: the tuning's choices, and how this machine differs from the tuned one.
        name: name of the file, for reports.
    """

    def __init__(self, choices: Choices, name: str) -> None:
        self.choices, self.name = choices, printable(name, 200)
        self._followed: set[TunedPair] = set()
        self._known: dict[Any, TunedCall | None] = {}
        self._gemm_sms = "it is applied by counterpoint.overlap(model, tuned=...), to all matmuls"  # why it is not
        self._limit = ""  # text of the limit that is applied

    def find(
        self,
        operation: str,
        *,
        ranks: int,
        num_bytes: int,
        dtype: str | None = None,
        compute: str | None = None,
        where: tuple[str, ...] = (),
    ) -> TunedCall | None:
        """Return the tuning's choice for a call whose full array has `num_bytes`; None: built-in rules decide."""
        key = operation, ranks, num_bytes, dtype, compute, where
        if key not in self._known:
            pair = self.choices.find(
                operation, ranks=ranks, bytes_per_rank=num_bytes / ranks, dtype=dtype, compute=compute, where=where
            )
            if pair is not None:
                self._followed.add(pair)
            self._known[key] = None if pair is None else self._call(pair)
        return self._known[key]

    def names(self, operation: str) -> bool:
        """Return whether the tuning has a choice for this operation."""
        return any(pair.operation == operation for pair in self.choices.pairs)

    def limit_gemms(self, undo: ExitStack, device_type: str) -> None:
        """Limit the SMs of this thread's GEMMs until `undo` is closed, if all choices that name a limit agree."""
        knobs = [knob for pair in self.choices.pairs for knob in mechanism_knobs(pair)]
        asked = sorted({value for key, _, value in (knob.partition("=") for knob in knobs) if key == _GEMM_SMS})
        if not asked:
            return
        if len(asked) > 1 or not asked[0].isdecimal():
            self._gemm_sms = f"one limit holds for all matmuls, and the choices name {', '.join(asked)}"
            return
        control = GemmSmLimit(num_sms=int(asked[0]))
        why_not = "a CPU has no SMs" if device_type != "cuda" else control.available()
        if why_not is None:
            undo.enter_context(control.limit())
            self._limit = f"matmuls have {control.num_sms} SMs"
        self._gemm_sms = why_not or ""

    def __str__(self) -> str:
        total, followed = len(self.choices.pairs), len(self._followed)
        said = f"{followed} of {total} choices followed"
        if not followed:
            said = f"changes nothing: no call so far has one of its {total} choices"
        parts = [f"{self.name}: {said}", self._limit, *map(str, self.choices.differences)]
        return "; ".join(filter(None, parts))

    def _call(self, pair: TunedPair) -> TunedCall:
        left_out = "".join(f"; {text}" for text in map(self._knob_text, mechanism_knobs(pair)) if text)
        why = f"{printable(pair.mechanism)} by {self.name}: {printable(pair.why)}{left_out}"
        return TunedCall(mechanism=mechanism_base(pair), stays=stays_with_torch(pair), why=why)

    def _knob_text(self, knob: str) -> str:
        """Return why a choice's setting `knob`, `key=value`, is not applied; "" if it is."""
        if knob.startswith(f"{_GEMM_SMS}="):
            why_not = self._gemm_sms
        elif (setting := _setting(knob)) is None:
            why_not = "give it to process groups when they are made"
        elif os.environ.get(setting[0]) == setting[1]:
            why_not = ""
        else:
            command = f"counterpoint tune {self.name} --to env"
            why_not = f"set {'='.join(setting)} before the groups are made ({command})"
        return why_not and f"{printable(knob)} not applied: {why_not}"


def _setting(knob: str) -> tuple[str, str] | None:
    """Return the environment variable and value that set a knob of later process groups; None if there is none."""
    if knob == "priority=high":
        return "TORCH_NCCL_HIGH_PRIORITY", "1"
    key, _, value = knob.partition("=")
    return (VARIABLES[key], value) if key in VARIABLES else None


def follow_together(
    tuned: Tuned | str | Path | None, groups: Iterable[Any], *, device_type: str
) -> FollowedTuning | None:
    """Return the tuning that calls follow; None if no file is named. All ranks of all groups call this.

    Args:
        tuned: a tuning, the path of its file, or `off`; None: what COUNTERPOINT_TUNED names.
        groups: process groups of this rank whose ranks decide together: the groups of all axes of a mesh.
        device_type: type of the device of the groups' calls, cuda or cpu.

    Raises:
        Misconfigured: the file cannot be read, a choice is impossible, or ranks follow different tunings; on all ranks.
    """
    found: FollowedTuning | None = None
    error: Misconfigured | None = None
    said = "no file"
    try:
        read = _read(tuned)
        if read is not None:
            tuning, name = read
            found = FollowedTuning(Choices(tuning, this_machine(device_type)), name)
            said = "; ".join([tuned_digest(tuning), *map(str, found.choices.differences)])
    except Misconfigured as raised:
        error, said = raised, str(raised)
    _agree(groups, said)
    if error is not None:
        raise error
    if found is not None and found.choices.differences:
        warnings.warn(f"{found.name}: {'; '.join(map(str, found.choices.differences))}", UserWarning, stacklevel=5)
    return found


def _agree(groups: Iterable[Any], said: str) -> None:
    """Raise `Misconfigured` unless all ranks of all groups give the same text `said`.

    A difference in one group has to reach ranks that are in other groups only, so it is passed on, axis by axis. The
    order of groups is the same on all ranks, so that no two ranks wait for each other.

    Raises:
        Misconfigured: two ranks gave different texts; on all ranks.
    """
    by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    problem = ""
    for ranks in sorted(by_ranks) * _AXES:
        everyone = gather_values(by_ranks[ranks], (said, problem))
        known = [theirs for _, theirs in everyone if theirs]
        known += [
            f"ranks follow different tunings: {everyone[0][0]} on rank {ranks[0]}, {text} on rank {rank}; give all the "
            f"same (argument tuned, variable {VARIABLE})"
            for rank, (text, _) in zip(ranks, everyone, strict=True)
            if text != everyone[0][0]
        ]
        problem = problem or next(iter(known), "")
    if problem:
        raise Misconfigured(problem)


def _read(tuned: Tuned | str | Path | None) -> tuple[Tuned, str] | None:
    """Return the tuning and its file's name; None if no file is named."""
    if isinstance(tuned, Tuned):
        return tuned, "tuning"
    named = os.environ.get(VARIABLE) if tuned is None else str(tuned)
    if not named or named == OFF:
        return None
    return read_tuned(named), named


def this_machine(device_type: str) -> Environment:
    """Return a description of this machine, to compare it with the machine on which a tuning was made."""
    on_gpu = device_type == "cuda"
    return Environment(
        device=device_type,
        gpu=torch.cuda.get_device_name() if on_gpu else None,
        world_size=1,
        driver=None,
        torch=str(torch.__version__),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        counterpoint=VERSION,
        commit=None,
        command=(),
        date="",
        variables={},
    )
