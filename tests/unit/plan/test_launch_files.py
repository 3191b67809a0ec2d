"""What launchers read: the files say the placement, and what cannot say it is not written."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.launch_files import (
    device_mesh,
    distribution,
    gpus_in_order,
    hostfile,
    launch_files,
    rankfile,
    ranks_csv,
    slurm_hostfile,
)
from counterpoint.plan.placement import Placement
from counterpoint.plan.placement_cost import Layout

NOTHING = Layout(name="found", cost=0.0, levels=())


def placed(slots: Sequence[int], hosts: int = 2, gpus: int = 4) -> Placement:
    return Placement(
        hosts=tuple(f"n{i}" for i in range(hosts)), gpus=gpus, slots=tuple(slots), found=NOTHING, compared=(), steps=()
    )


SWAPPED = placed([4, 5, 6, 7, 0, 1, 2, 3])  # the second host first
MIXED = placed([0, 4, 5, 1, 2, 6, 7, 3])
BACKWARDS = placed([3, 2, 1, 0, 4, 5, 6, 7])


def test_slurm_hostfile() -> None:
    """A host per rank."""
    assert slurm_hostfile(MIXED).split() == ["n0", "n1", "n1", "n0", "n0", "n1", "n1", "n0"]


def test_rankfile() -> None:
    """Slots of Open MPI count the ranks of a host."""
    assert rankfile(MIXED).splitlines()[:4] == [
        "rank 0=n0 slot=0",
        "rank 1=n1 slot=0",
        "rank 2=n1 slot=1",
        "rank 3=n0 slot=1",
    ]


def test_hostfile() -> None:
    """Hosts in the order in which ranks fill them."""
    assert hostfile(SWAPPED) == "n1 slots=4\nn0 slots=4\n"


def test_a_hostfile_cannot_mix_hosts() -> None:
    """It is refused, and the rankfile named instead."""
    with pytest.raises(Misconfigured, match="use the rankfile"):
        hostfile(MIXED)


def test_ranks_csv() -> None:
    """Rank, host, GPU, and the local rank that a launcher gives."""
    assert ranks_csv(BACKWARDS).splitlines()[:3] == ["rank,host,gpu,local_rank", "0,n0,3,0", "1,n0,2,1"]


@pytest.mark.parametrize(
    ("slots", "pattern"),
    [
        (range(8), "block"),
        ([0, 4, 1, 5, 2, 6, 3, 7], "cyclic"),
        ([0, 1, 4, 5, 2, 3, 6, 7], "plane=2"),
        ([4, 5, 6, 7, 0, 1, 2, 3], None),
        ([3, 2, 1, 0, 4, 5, 6, 7], None),
        ([0, 1, 2, 3], None),
    ],
)
def test_patterns_of_slurm(slots: Sequence[int], pattern: str | None) -> None:
    """Block, cyclic, plane; None where no pattern says it, or GPUs are in another order."""
    assert distribution(placed(slots)) == pattern


@given(order=st.permutations(range(8)))
def test_a_device_mesh_finds_every_rank_again(order: list[int]) -> None:
    """`ranks[r]`, counted along `hosts`, is the slot of rank r."""
    found = json.loads(device_mesh(placed(order), (("tp", 4), ("dp", 2))))
    slots = [int(found["hosts"][rank // 4][1:]) * 4 + rank % 4 for rank in found["ranks"]]
    assert (slots, found["shape"], found["mesh_dim_names"]) == (list(order), [2, 4], ["dp", "tp"])


def test_a_host_used_in_part_has_no_device_mesh() -> None:
    """torchrun would start a process on each GPU."""
    with pytest.raises(Misconfigured, match="used in part"):
        device_mesh(placed([0, 1, 2, 3, 4]))


def test_a_mesh_of_another_size_is_refused() -> None:
    """Eight ranks are no mesh of 2 x 2."""
    with pytest.raises(Misconfigured, match="one of 8 ranks"):
        device_mesh(SWAPPED, (("tp", 2), ("dp", 2)))


@pytest.mark.parametrize(("placement", "in_order"), [(MIXED, True), (BACKWARDS, False)])
def test_local_ranks_are_gpus(placement: Placement, in_order: bool) -> None:
    """True where the GPUs of each host rise with its ranks."""
    assert gpus_in_order(placement) is in_order


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        (SWAPPED, ["ranks.csv", "slurm_hostfile", "rankfile", "hostfile", "device_mesh.json"]),
        (MIXED, ["ranks.csv", "slurm_hostfile", "rankfile", "device_mesh.json"]),
        (placed([0, 4, 1]), ["ranks.csv", "slurm_hostfile", "rankfile"]),
    ],
)
def test_only_files_that_can_say_it_are_made(placement: Placement, names: list[str]) -> None:
    """No hostfile for mixed hosts, no device mesh for a host in part."""
    assert [file.name for file in launch_files(placement)] == names


def test_other_orders_of_gpus_are_told() -> None:
    """A launcher's file alone would give every rank another GPU: its use says where the right one stands."""
    uses = {file.name: file.use for file in launch_files(BACKWARDS)}
    assert ["ranks.csv" in uses[name] for name in ("slurm_hostfile", "rankfile", "hostfile")] == [True] * 3


@given(seed=st.integers(0, 1000))
def test_files_agree(seed: int) -> None:
    """The rankfile and the Slurm hostfile name the same host for every rank."""
    placement = placed(np.random.default_rng(seed).permutation(8)[:5].tolist())
    hosts = [line.split("=")[1].split()[0] for line in rankfile(placement).splitlines()]
    assert hosts == slurm_hostfile(placement).split()
