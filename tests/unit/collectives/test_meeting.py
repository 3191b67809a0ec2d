"""Ranks that have met others before find each other by the keys of a store, as torch's symmetric memory writes them."""

from collections.abc import Iterator
from itertools import count

from torch._C._distributed_c10d import HashStore, PrefixStore

from counterpoint.collectives.cuda.regions import NumberedStore


class Torch:
    """Gathers values as torch does, which numbers the meetings of a process."""

    def __init__(self, store: NumberedStore, rank: int, meetings: Iterator[int]) -> None:
        self._store, self._rank, self._meetings = store, rank, meetings

    def puts(self, value: bytes) -> int:
        number = next(self._meetings)
        self._store.set(f"CUDASymmetricMemory/{number}/{self._rank}", value)
        return number

    def gets(self, number: int) -> list[bytes]:
        return [self._store.get(f"CUDASymmetricMemory/{number}/{rank}") for rank in range(2)]


def test_ranks_with_other_numbers_meet() -> None:
    store = HashStore()
    first, second = (Torch(NumberedStore(store), rank, count(start)) for rank, start in ((0, 7), (1, 3)))
    for values in ([b"a", b"b"], [b"c", b"\x00\xff"]):
        numbers = [rank.puts(value) for rank, value in zip((first, second), values, strict=True)]
        assert numbers[0] != numbers[1]
        assert [rank.gets(number) for rank, number in zip((first, second), numbers, strict=True)] == [values, values]


def test_a_barrier_meets() -> None:
    store = HashStore()
    one, other = NumberedStore(store), NumberedStore(store)
    assert (one.add("memory/5", 1), other.add("memory/2", 1)) == (1, 2)
    other.set("memory/2/last", b"1")
    one.wait(["memory/5/last"])
    assert one.check(["memory/5/last"])
    assert not one.check(["memory/6/last"])


def test_torch_calls_it() -> None:
    """From C++, which knows a store by its base class."""
    one = NumberedStore(HashStore())
    prefixed = PrefixStore("memory/4", one)
    prefixed.set("0", "value")
    assert prefixed.get("0") == b"value" == one.get("memory/4/0")
