"""What makes a process a rank of a rehearsal, and what it then takes for its host."""

import os
import re

import pytest

from counterpoint.collectives.cuda.peer_access import CudaCard, why_not
from counterpoint.errors import Misconfigured
from counterpoint.rehearsed import host_id, is_rehearsal, local_rank, rank_variables, visible_devices
from counterpoint.tuning.script_launch import parse_command


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks_per_host: int, gpus: tuple[str, ...] = ("0",)) -> None:
    """Gives this process the variables of a rank."""
    for name, value in rank_variables(rank, ranks_per_host=ranks_per_host, gpus=gpus).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("ranks", "per_host", "gpus", "devices", "hosts"),
    [
        (4, 4, ("0",), ["0"] * 4, [0, 0, 0, 0]),
        (4, 2, ("GPU-7",), ["GPU-7"] * 4, [0, 0, 1, 1]),
        (5, 5, ("2", "3"), ["2", "3", "2", "3", "2"], [0] * 5),
        (4, 1, ("1", "0"), ["1", "0", "1", "0"], [0, 1, 2, 3]),
    ],
)
def test_ranks_are_dealt_out_to_gpus_and_counted_on_hosts(
    monkeypatch: pytest.MonkeyPatch, ranks: int, per_host: int, gpus: tuple[str, ...], devices: list[str],
    hosts: list[int],
) -> None:  # fmt: skip
    """GPUs in turn, hosts in order; each rank sees one GPU, and is a host of its own for NCCL, over loopback."""
    made = [rank_variables(rank, ranks_per_host=per_host, gpus=gpus) for rank in range(ranks)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == devices
    assert {each["LOCAL_RANK"] for each in made} == {"0"}
    assert {each["LOCAL_WORLD_SIZE"] for each in made} == {str(per_host)}
    assert len({each["NCCL_HOSTID"] for each in made}) == ranks
    assert {(each["NCCL_NET"], each["NCCL_SOCKET_IFNAME"]) for each in made} == {("Socket", "lo")}
    found = []
    for rank in range(ranks):
        as_rank(monkeypatch, rank, per_host, gpus)
        found.append((host_id(), local_rank()))
    same = {host: {name for (name, _), on in zip(found, hosts, strict=True) if on == host} for host in hosts}
    assert [len(names) for names in same.values()] == [1] * len(same)
    assert len(set.union(*same.values())) == len(same)
    assert [local for _, local in found] == [str(rank % per_host) for rank in range(ranks)]


def test_ranks_on_cpus_see_no_gpu() -> None:
    """Their LOCAL_RANK is what torchrun gives, and NCCL is left alone."""
    made = rank_variables(3, ranks_per_host=2, gpus=())
    assert (made["CUDA_VISIBLE_DEVICES"], made["LOCAL_RANK"], made["LOCAL_WORLD_SIZE"]) == ("", "1", "2")
    assert not [name for name in made if name.startswith("NCCL")]


def test_outside_a_rehearsal_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is the machine, and torchrun's number counts, if there is one."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (is_rehearsal(), local_rank(), "rehearsed" in host_id()) == (False, "", False)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert local_rank() == "5"


@pytest.mark.parametrize(
    ("listed", "count", "named"),
    [
        (None, 2, ("0", "1")),
        ("3,1", 2, ("3", "1")),
        (" 3 , 1 ", 1, ("3",)),
        ("GPU-a,-1,GPU-b", 1, ("GPU-a",)),  # CUDA stops at an entry that is none
        ("0,1", 0, ()),
        ("", 0, ()),
    ],
)
def test_gpus_are_named_as_the_user_chose_them(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int, named: tuple[str, ...]
) -> None:
    """The first ones that this process sees, by the entries of its own CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_devices(count) == named


def test_ranks_share_a_gpu_only_if_they_may() -> None:
    """Otherwise two of one GPU are told how they could; what else is in the way stays there."""
    cards = [CudaCard(host="a", gpu="g", no_access=(), lacks=None)] * 2
    assert why_not(cards, share_gpu=True) is None
    said = why_not(cards, share_gpu=False)
    assert said is not None
    assert re.search("ranks 0 and 1 use the same GPU; .*counterpoint rehearse", said)
    hosts = [CudaCard(host=host, gpu="g", no_access=(), lacks=None) for host in "ab"]
    assert "different hosts" in (why_not(hosts, share_gpu=True) or "")


@pytest.mark.parametrize("given_as", ["rehearse", "--run"])
def test_no_ranks_are_started_by_a_rank(monkeypatch: pytest.MonkeyPatch, given_as: str) -> None:
    as_rank(monkeypatch, 0, 2)
    with pytest.raises(Misconfigured, match=f"{given_as}: this is a rank of counterpoint rehearse"):
        parse_command("torchrun --nproc-per-node 2 train.py", given_as)
    assert os.environ["LOCAL_RANK"] == "0"
