"""What launchers read: the files say the placement, and what cannot say it is not written."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.plan.placement.launch_files import distribution, launch_files
from counterpoint.plan.placement.place import Placement
from counterpoint.records.prediction import RankOrder

NOTHING = RankOrder(name="found", cost=0.0, levels=(), time_us=None)


def placed(slots: Sequence[int], hosts: int = 2, gpus: int = 4) -> Placement:
    return Placement(
        hosts=tuple(f"n{i}" for i in range(hosts)), gpus=gpus, slots=tuple(slots), found=NOTHING, compared=(), steps=()
    )


SWAPPED = placed([4, 5, 6, 7, 0, 1, 2, 3])  # the second host first
MIXED = placed([0, 4, 5, 1, 2, 6, 7, 3])


def file(placement: Placement, name: str, mesh: Sequence[tuple[str, int]] = ()) -> str:
    return next(each.text for each in launch_files(placement, mesh) if each.name == name)


def test_slurm_hostfile() -> None:
    assert file(MIXED, "slurm_hostfile").split() == ["n0", "n1", "n1", "n0", "n0", "n1", "n1", "n0"]


def test_rankfile() -> None:
    assert file(MIXED, "rankfile").splitlines()[:4] == [
        "rank 0=n0 slot=0", "rank 1=n1 slot=0", "rank 2=n1 slot=1", "rank 3=n0 slot=1",
    ]  # fmt: skip


def test_hostfile() -> None:
    assert file(SWAPPED, "hostfile") == "n1 slots=4\nn0 slots=4\n"


def test_ranks_csv() -> None:
    """Rank, host, GPU, and the local rank that a launcher gives."""
    assert file(MIXED, "ranks.csv").splitlines()[:3] == ["rank,host,gpu,local_rank", "0,n0,0,0", "1,n1,0,0"]


@pytest.mark.parametrize(
    ("slots", "pattern"),
    [
        (range(8), "block"),
        ([0, 4, 1, 5, 2, 6, 3, 7], "cyclic"),
        ([0, 1, 4, 5, 2, 3, 6, 7], "plane=2"),
        ([4, 5, 6, 7, 0, 1, 2, 3], None),
        ([0, 1, 2, 3], None),
    ],
)
def test_patterns_of_slurm(slots: Sequence[int], pattern: str | None) -> None:
    """Block, cyclic, plane; None where no pattern says it, or hosts stay free."""
    assert distribution(placed(slots)) == pattern


@given(order=st.permutations(range(8)))
def test_a_device_mesh_finds_every_rank_again(order: list[int]) -> None:
    """`ranks[r]`, counted along `hosts`, is the slot of rank r."""
    found = json.loads(file(placed(order), "device_mesh.json", (("tp", 4), ("dp", 2))))
    slots = [int(found["hosts"][rank // 4][1:]) * 4 + rank % 4 for rank in found["ranks"]]
    assert (slots, found["shape"], found["mesh_dim_names"]) == (list(order), [2, 4], ["dp", "tp"])


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        (SWAPPED, ["ranks.csv", "slurm_hostfile", "rankfile", "hostfile", "device_mesh.json"]),
        (MIXED, ["ranks.csv", "slurm_hostfile", "rankfile", "device_mesh.json"]),
        (placed([0, 4, 1]), ["ranks.csv", "slurm_hostfile", "rankfile"]),
    ],
)
def test_only_files_that_can_say_it_are_made(placement: Placement, names: list[str]) -> None:
    assert [file.name for file in launch_files(placement)] == names


@given(seed=st.integers(0, 1000))
def test_files_agree(seed: int) -> None:
    placement = placed(np.random.default_rng(seed).permutation(8)[:5].tolist())
    hosts = [line.split("=")[1].split()[0] for line in file(placement, "rankfile").splitlines()]
    assert hosts == file(placement, "slurm_hostfile").split()
