"""Memory of a GPU is used again after what streams still do with it, and events are used again after that."""

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.collectives.cuda.call import Prepared
from counterpoint.collectives.cuda.driver import EventPool, Executor
from counterpoint.collectives.cuda.memory_reuse import StreamOrder
from counterpoint.collectives.cuda.queues import CallQueue
from counterpoint.collectives.memory import Location
from counterpoint.collectives.submit.submission import Submission
from counterpoint.errors import CounterpointError
from tests.support.software_gpu import SoftwareGpu

HERE, THERE = Location(0, 512), Location(0, 4096)


class Device:
    """A software GPU with two streams, the first of which is current."""

    def __init__(self) -> None:
        self.gpu = SoftwareGpu()
        self.one, self.two = self.gpu.new_stream(), self.gpu.new_stream()
        self.gpu.use(self.one)
        self.events = EventPool(self.gpu.driver)
        self.order = StreamOrder(self.events, self.gpu)

    def block(self, stream: int) -> threading.Event:
        """What holds the stream up until it is set."""
        gate = threading.Event()
        self.gpu.driver.enqueue(stream, "kernel", gate.wait)
        return gate


@pytest.fixture
def device() -> Device:
    return Device()


def test_a_moment_passes_when_its_stream_comes_to_it(device: Device) -> None:
    gate = device.block(device.one)
    moment = device.events.record(device.one)
    before = device.events.passed(moment)
    gate.set()
    device.gpu.synchronize()
    assert (before, device.events.passed(moment)) == (False, True)


def test_events_are_used_again(device: Device) -> None:
    for _ in range(3):
        device.events.record(device.one)
        gc.collect()
    assert len(device.events._made) == 1


def test_a_broken_device_is_told(device: Device) -> None:
    moment = device.events.record(device.one)
    device.events._query = lambda event: (700,)
    with pytest.raises(CounterpointError, match="cuEventQuery failed: 700"):
        device.events.passed(moment)


def test_another_stream_waits_for_the_last_use(device: Device) -> None:
    seen = list[str]()
    device.order.used(HERE, device.one)
    gate = device.block(device.one)
    device.gpu.kernel(lambda: seen.append("old"))
    after = device.order.freed(HERE, 100)
    assert not isinstance(after, str)
    device.gpu.use(device.two)
    device.order.taken(HERE, after)
    device.gpu.kernel(lambda: seen.append("new"))
    gate.set()
    device.gpu.synchronize()
    assert seen == ["old", "new"]


@pytest.mark.parametrize(
    ("at", "capture", "after"), [(THERE, 0, ()), (HERE, 3, "never")], ids=["other bytes", "in a graph"]
)
def test_what_need_not_or_cannot_be_waited_for(device: Device, at: Location, capture: int, after: object) -> None:
    device.order.used(at, device.two, capture=capture)
    assert device.order.freed(HERE, 512) == after


def test_every_stream_is_waited_for(device: Device) -> None:
    device.order.used(HERE, device.one)
    device.order.used(HERE + 64, device.two)
    after = device.order.freed(HERE, 512)
    assert not isinstance(after, str)
    assert {moment.stream for moment in after} == {device.one, device.two}


def test_what_dies_in_a_capture_is_free_after_it(device: Device) -> None:
    """Its stream's end cannot be waited for before, but the graph does not use it."""
    device.order.used(HERE, device.one)
    device.gpu.driver.cuStreamBeginCapture(device.one, 2)
    during = device.order.freed(HERE, 512)
    device.gpu.driver.cuStreamEndCapture(device.one)
    assert (during, type(device.order.freed(HERE, 512))) == ("later", tuple)


def test_neighbours_that_become_one_keep_the_latest_points(device: Device) -> None:
    first, second, other = (device.events.record(stream) for stream in (device.one, device.one, device.two))
    assert set(device.order.merged((first, other), (second,))) == {second, other}


def test_a_call_notes_on_which_streams_it_uses_memory(device: Device) -> None:
    """Each time the stream is another or memory was freed."""
    waiter = SimpleNamespace(watchdog=SimpleNamespace(rank=0, statuses=[SimpleNamespace(channels=[None])]))
    context: Any = SimpleNamespace(gpu=device.gpu, events=device.events, order=device.order, waiter=waiter)
    executor = Executor(driver=device.gpu.driver)
    queue = CallQueue(context, executor, device.one, 0)
    prepared = Prepared(SimpleNamespace(), (), executor)  # type: ignore[arg-type]
    submission = Submission(text="", channel=0, line=0, at=HERE, input_at=(THERE,))

    def noted(*issued: int) -> list[set[int]]:
        for stream in issued:
            queue._issue(submission, prepared, stream, stream, 0)
        return [{getattr(point, "stream", -1) for point in device.order.freed(at, 512)} for at in (HERE, THERE)]

    one, two = device.one, device.two
    assert [noted(one), noted(one), noted(one, two), noted()] == [
        [{one}] * 2, [{one}] * 2, [{one, two}] * 2, [set()] * 2,
    ]  # fmt: skip
