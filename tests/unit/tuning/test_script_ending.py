"""Which rank has ended a script, by the last words of torchrun and of the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.processes import failure_file, write_whole
from counterpoint.records.measurement import RankFailure
from counterpoint.tuning.script_launch import ERRORS, LOG, _died

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:31910. This is typically caused by a remote worker crashing"
TORCHRUN = """
counterpoint.rehearsal.rank FAILED
Failures:
{}Root Cause (first observed failure):
{}"""
RANK = """[{0}]:
  time      : 2026-11-23_21:48:23
  host      : localhost
  rank      : {0} (local_rank: {0})
  exitcode  : {1} (pid: 6990)  (SIGKILL)
  error_file: <N/A>
"""


def said(folder: Path, root: tuple[int, int], *others: tuple[int, int], words: dict[int, str]) -> str:
    """What is said when torchrun saw these ranks end with these codes, and ranks left these words."""
    log = TORCHRUN.format("".join(RANK.format(*other) for other in others), RANK.format(*root))
    (folder / LOG).write_text(log)
    for rank, text in words.items():
        write_whole(
            failure_file(folder / ERRORS, rank), RankFailure(rank=rank, kind="RuntimeError", text=text, scenario=None)
        )
    return str(_died(folder, 1))


@pytest.mark.parametrize(
    ("root", "others", "words", "named"),
    [
        ((1, -9), [(0, -15)], {}, "rank 1 was killed by SIGKILL"),
        ((0, 1), [(1, -9)], {0: LOST}, "rank 1 was killed by SIGKILL"),
        ((0, 1), [(1, -9), (2, -15)], {0: LOST}, "rank 1 was killed by SIGKILL"),
        ((0, 1), [(1, 1)], {0: LOST, 1: "no data"}, "rank 1 failed in the script: RuntimeError: no data"),
        ((0, 1), [(1, -15)], {0: LOST}, "rank 0 failed in the script: RuntimeError: [pair.cc:553] Connection closed"),
        ((0, 1), [(1, -9)], {0: "no data"}, "rank 0 failed in the script: RuntimeError: no data"),
    ],
)
def test_the_cause_is_named(
    tmp_path: Path, root: tuple[int, int], others: list[tuple[int, int]], words: dict[int, str], named: str
) -> None:
    """Not the rank that lost it, whichever torchrun saw first; nor one that torchrun ended itself."""
    assert said(tmp_path, root, *others, words=words).startswith(named)
