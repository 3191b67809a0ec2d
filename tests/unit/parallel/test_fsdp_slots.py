"""Which modules share memory for their whole parameters."""

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.parallel.fsdp.slots import Lifetime, assign_slots

LAYER, ENDS = 436, 1050


def stays(*num_bytes: int) -> list[Lifetime]:
    """Modules one after the other, each freed when it has computed."""
    return [Lifetime(size, (at, at)) for at, size in enumerate(num_bytes)]


def bytes_in_all(planned: list[Lifetime], ahead: int = 1) -> int:
    """Of slots that are as large as the largest who lives there."""
    sizes: dict[int, int] = {}
    for slot, stay in zip(assign_slots(planned, ahead=ahead), planned, strict=True):
        sizes[slot] = max(sizes.get(slot, 0), stay.num_bytes)
    return sum(sizes.values())


def test_layers_take_turns() -> None:
    """Two slots, or one more for each that is gathered ahead."""
    assert assign_slots(stays(*[LAYER] * 5), ahead=1) == [0, 1, 0, 1, 0]
    assert assign_slots(stays(*[LAYER] * 5), ahead=2) == [0, 1, 2, 0, 1]


def test_ends_live_where_layers_do() -> None:
    """Embedding and head, of more than a layer each, need no slot besides: two of their size are all."""
    for layers in (11, 12):
        assert bytes_in_all(stays(ENDS, *[LAYER] * layers, ENDS + 1)) <= 2 * ENDS + 1


def test_who_stays_to_the_end_lives_alone() -> None:
    """A root whose layers compute inside it; and the last module, kept for the backward pass."""
    root = [Lifetime(ENDS, (0, 6)), *(Lifetime(LAYER, (at, at)) for at in range(1, 7))]
    assert bytes_in_all(root) == ENDS + 2 * LAYER
    assert assign_slots(root, ahead=1).count(0) == 1


spans = st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(1, 1000))


@given(st.lists(spans, max_size=25), st.integers(1, 3))
def test_nobody_meets_at_a_slot(drawn: list[tuple[int, int, int]], ahead: int) -> None:
    """Whoever is gathered finds the slot left by whoever lived there before."""
    planned = [Lifetime(size, (first, first + length)) for first, length, size in sorted(drawn)]
    found = assign_slots(planned, ahead=ahead)
    for later, (slot, stay) in enumerate(zip(found, planned, strict=True)):
        for other in range(later):
            apart = planned[other].span[1] < stay.span[0] - ahead
            assert found[other] != slot or apart
