"""The thread that starts buckets: who waits for what, and in which order callbacks come."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counterpoint.errors import Misconfigured, PeerTimeout
from counterpoint.parallel.background import Background, BackgroundCall

LONG_S = 60.0


@pytest.fixture
def background() -> Iterator[Background]:
    communicator: Any = SimpleNamespace(device=torch.device("cpu"), channels=2)
    made = Background(communicator)
    yield made
    made.close()


def held(background: Background, order: list[str], name: str) -> tuple[BackgroundCall, threading.Event]:
    """A call that ends when its event is set, and then notes its name."""
    go = threading.Event()

    def run(_channel: int) -> None:
        go.wait(LONG_S)
        order.append(name)

    return background.start(run, 0, name), go


def drained(background: Background, order: list[str]) -> None:
    background.drain()
    order.append("drained")


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_a_drain_waits_for_what_was_handed_over_while_another_thread_drained(background: Background) -> None:
    order = list[str]()
    _, first = held(background, order, "first")
    one = in_thread(background.drain)
    one.join(0.2)  # it waits for the first
    _, second = held(background, order, "second")
    first.set()
    one.join(LONG_S)
    other = in_thread(lambda: drained(background, order))
    other.join(0.2)
    second.set()
    other.join(LONG_S)
    assert order == ["first", "second", "drained"]


def test_a_call_of_a_callback_comes_before_the_call_that_was_handed_over_next(background: Background) -> None:
    order = list[str]()
    call, go = held(background, order, "first")

    def callback(_: Any) -> None:
        background.drain()
        background.start(lambda _channel: order.append("of the callback"), 1, None).wait()

    chained = call.future.then(callback)
    background.start(lambda _channel: order.append("second"), 0, None)
    go.set()
    chained.wait()
    background.drain()
    assert order == ["first", "of the callback", "second"]


def test_a_drain_waits_for_callbacks(background: Background) -> None:
    """What is called after it has its place behind what they call."""
    order, may_end = list[str](), threading.Event()
    call, go = held(background, order, "call")

    def callback(_: Any) -> None:
        may_end.wait(LONG_S)
        order.append("callback")

    call.future.then(callback)
    go.set()
    thread = in_thread(lambda: drained(background, order))
    thread.join(0.2)
    may_end.set()
    thread.join(LONG_S)
    assert order == ["call", "callback", "drained"]


def test_a_callback_that_raises_leaves_the_thread_to_others(background: Background) -> None:
    call, go = held(background, [], "call")
    chained = call.future.then(lambda _: 1 / 0)
    go.set()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        chained.wait()
    assert background.start(lambda _channel: None, 0, "next").future.wait() == "next"


def test_a_wait_raises_the_error_of_a_call_or_ends_at_its_timeout(background: Background) -> None:
    call = background.start(lambda _channel: 1 / 0, 0, None)
    background.drain()
    with pytest.raises(ZeroDivisionError):
        call.wait()
    call, go = held(background, [], "call")
    with pytest.raises(PeerTimeout, match=r"has not ended within 0\.05 s"):
        call.wait(0.05)
    go.set()
    assert call.wait(LONG_S)


def test_a_callback_cannot_wait_for_what_comes_after_it(background: Background) -> None:
    """It would wait for ever: its own thread starts that."""
    call, go = held(background, [], "call")
    later = list[BackgroundCall]()
    chained = call.future.then(lambda _: later[0].wait())
    later.append(background.start(lambda _channel: None, 0, None))
    go.set()
    with pytest.raises(RuntimeError, match=Misconfigured.__name__):
        chained.wait()


@pytest.mark.parametrize("how", ["drain", "wait"])
def test_callbacks_of_two_groups_that_wait_for_each_other_are_told(background: Background, how: str) -> None:
    """One of them at least, and the other one goes on."""
    other = Background(background.communicator)
    both, calls = threading.Barrier(2, timeout=LONG_S), dict[Background, BackgroundCall]()

    def callback(of: Background) -> str:
        both.wait()
        try:
            of.drain() if how == "drain" else calls[of].wait()
        except Misconfigured as error:
            return str(error)
        return "went on"

    (one, first), (two, second) = held(background, [], "one"), held(other, [], "two")
    answers = [one.future.then(lambda _: callback(other)), two.future.then(lambda _: callback(background))]
    calls |= {each: each.start(lambda _channel: None, 0, None) for each in (background, other)}
    first.set()
    second.set()
    said = [answer.wait() for answer in answers]
    other.close()
    assert any("a callback waits" in each for each in said)
    assert {"went on"} >= {each for each in said if "a callback waits" not in each}
