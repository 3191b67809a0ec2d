"""Ranks of two recordings put together are told apart from ranks of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.errors import BadTrace

SAMPLES = Path(__file__).resolve().parents[3] / "samples"


def mixed(folder: Path, ranks: dict[str, list[int]]) -> Path:
    for sample, chosen in ranks.items():
        for rank in chosen:
            shutil.copy(SAMPLES / sample / f"rank{rank}.json.gz", folder)
    return folder


def test_two_runs_of_the_same_program(tmp_path: Path) -> None:
    """Their collectives have the same names and sizes, but no clock fits both."""
    with pytest.raises(BadTrace, match="ranks of different runs"):
        diagnose(mixed(tmp_path, {"fsdp-healthy": [0, 1, 2, 3], "fsdp-host-stall": [4, 5, 6, 7]}))


def test_two_programs(tmp_path: Path) -> None:
    """Their groups have the same name and ranks, but no collective in common."""
    with pytest.raises(BadTrace, match=r"rank1\.json\.gz.*none of its collectives"):
        diagnose(mixed(tmp_path, {"fsdp-healthy": [0], "tail-effect": [1]}))


def test_some_ranks_of_one_run(tmp_path: Path) -> None:
    """Are diagnosed, and the others named as missing."""
    diagnosis = diagnose(mixed(tmp_path, {"fsdp-healthy": [1, 2, 6]})).diagnosis
    assert (diagnosis.ranks, diagnosis.missing_ranks) == ((1, 2, 6), (0, 3, 4, 5, 7))
