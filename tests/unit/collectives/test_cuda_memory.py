"""What can be said about GPUs' symmetric memory without a GPU: who cannot share it and why, and where regions begin."""

import os
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import _SymmetricMemory

from counterpoint.collectives.cuda.peer_access import CudaCard, prepare_process, why_not
from counterpoint.collectives.cuda.regions import CudaMemory, _addresses, _Region, living_segments
from counterpoint.collectives.memory import Location
from counterpoint.errors import Misconfigured, Unsupported


def card(gpu: str, host: str = "a", no_access: tuple[str, ...] = (), lacks: str | None = None) -> CudaCard:
    return CudaCard(host=host, gpu=gpu, no_access=no_access, lacks=lacks)


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        ([card("g0"), card("g1"), card("g2")], None),
        ([card("g0"), card("g1", host="b")], "ranks 0 and 1 are on different hosts"),
        ([card("g0"), card("g1"), card("g0")], "ranks 0 and 2 use the same GPU"),
        ([card("g0"), card("g1", no_access=("g0",))], "ranks 0 and 1 have no peer access"),
        ([card("g0", no_access=("g2",)), card("g1"), card("g2")], "ranks 0 and 2 have no peer access"),
        ([card("g0"), card("g1", lacks="no symmetric memory")], "rank 1: no symmetric memory"),
    ],
)
def test_why_a_group_cannot(cards: list[CudaCard], reason: str | None) -> None:
    said = why_not(cards, share_gpu=False)
    assert (said is None) if reason is None else (said is not None and reason in said)


def test_addresses_follow_the_own_tensor() -> None:
    """Where torch puts the tensor behind the start of an allocation, every peer's is as far behind."""
    assert _addresses((0x1000, 0x9000), 1, 0x9200) == (0x1200, 0x9200)


def test_memory_that_is_not_mapped_is_refused() -> None:
    with pytest.raises(Unsupported, match="no memory of rank 2"):
        _addresses((0x1000, 0x2000, 0), 0, 0x1000)


@given(
    sizes=st.lists(st.sampled_from([2, 4]), max_size=6),
    addresses=st.permutations(range(6)),
    dead=st.sets(st.integers(0, 5)),
)
def test_segments_of_a_pool_are_mapped_in_the_order_of_their_tensors(
    sizes: list[int], addresses: list[int], dead: set[int]
) -> None:
    """Wherever each rank's allocator puts them, and though their memory was used before; without those that died."""
    made = [(100 * addresses[at], size) for at, size in enumerate(sizes)]
    trace = [{"action": action, "addr": addr} for addr, _ in sorted(made) for action in ("segment_alloc", "alloc")]
    trace += [{"action": "alloc", "addr": addr} for addr, _ in made]
    states = ["inactive" if at in dead else "active_allocated" for at in range(len(made))]
    snapshot = [
        {"address": addr, "total_size": size, "blocks": [{"state": state}]}
        for (addr, size), state in sorted(zip(made, states, strict=True))
    ]
    assert living_segments(snapshot, trace) == [one for at, one in enumerate(made) if at not in dead]


NAME = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_multicast_is_off_unless_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if before is None else {NAME: before})
    monkeypatch.setattr(_SymmetricMemory, "get_backend", lambda device: "CUDA", raising=False)
    prepare_process(0)
    assert os.environ[NAME] == after


@pytest.fixture
def memory() -> CudaMemory:
    """Rank 1 of 2, with one region of 4096 bytes that no torch made."""
    made = CudaMemory.__new__(CudaMemory)
    made._located = {}
    made.rank, made.world_size, made.device = 1, 2, 0
    made._regions = {3: _Region(owner=None, handle=None, addresses=(0x10000, 0x20000), num_bytes=4096)}
    return made


def test_locations_and_addresses_are_inverse(memory: CudaMemory) -> None:
    at = memory.locate(0x20010, 16)
    assert at == Location(3, 16)
    assert memory.address(0, at, 16) == 0x10010


@pytest.mark.parametrize("address", [0x1FFFF, 0x20FF1, 0x10000])
def test_bytes_outside_are_nowhere(memory: CudaMemory, address: int) -> None:
    assert memory.locate(address, 16) is None


@pytest.mark.parametrize("at", [Location(3, 4090), Location(3, -1), Location(0, 0)])
def test_an_address_outside_is_refused(memory: CudaMemory, at: Location) -> None:
    with pytest.raises(Misconfigured, match="make the same call on every rank"):
        memory.address(0, at, 16)


def test_a_new_region_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch, memory: CudaMemory) -> None:
    """It is made in the middle of training, when another thread may read a variable."""
    tensor = torch.zeros(16, dtype=torch.uint8)
    handle = SimpleNamespace(buffer_ptrs=(0x1000, tensor.data_ptr()))
    memory._meeting = SimpleNamespace(name="0")  # type: ignore[assignment]
    monkeypatch.setattr(_SymmetricMemory, "rendezvous", lambda tensor, name: handle, raising=False)
    with monkeypatch.context() as during:
        during.setattr(os, "environ", MappingProxyType({}))  # refuses to be written
        region = memory._map(tensor, owner=tensor)
    assert memory.address(0, Location(region, 3), 1) == 0x1003
