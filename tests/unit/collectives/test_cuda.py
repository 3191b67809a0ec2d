"""The executor issues what was lowered, on the right streams, everything made before; by a driver that takes notes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from counterpoint.collectives.cuda.call import Prepared
from counterpoint.collectives.cuda.driver import BindReduction, Bound, EventPool, Executor
from counterpoint.collectives.cuda.lower import Addresses, CopyAsync, DriverCall, ReduceLaunch, awaited, lower
from counterpoint.collectives.program.operations import plan
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.errors import CounterpointError, Misconfigured, Unsupported
from tests.support.cases import NAMES, case
from tests.support.fake_driver import FakeDriver

STREAM = 77
SUM = Reduction(op="sum", dtype="float32")
ADDRESSES = Addresses(
    input=1 << 20, output=(1 << 21, 1 << 22, 1 << 23), staging=(1 << 24, 1 << 25, 1 << 26),
    output_flags=(1 << 27, 1 << 28, 1 << 29), staging_flags=(1 << 30, 1 << 31, 1 << 32),
)  # fmt: skip


def lowered(name: str) -> tuple[DriverCall, ...]:
    call, tuning = case(name, 3)
    return lower(plan(call, 1, tuning), ADDRESSES)


class Reductions:
    """Stands in for a GPU: writes down what was bound and how often it was launched."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.bound = driver, list[tuple[ReduceLaunch, int]]()

    def bind_reduction(self, call: ReduceLaunch, stream: int, reduction: Reduction) -> Callable[[], object]:
        self.bound.append((call, stream))
        return lambda: self.driver.log.append(("reduce", call))


def summing(reductions: Reductions) -> BindReduction:
    return partial(reductions.bind_reduction, reduction=SUM)


def bound(name: str) -> tuple[FakeDriver, Executor, Bound]:
    """A driver, its executor, and a call that is bound to `STREAM` with its sums."""
    driver = FakeDriver()
    executor = Executor(driver=driver)
    return driver, executor, executor.bind(lowered(name), STREAM, reduction=summing(Reductions(driver)))


def times(driver: FakeDriver, call: str) -> int:
    """How often a function of the driver was called."""
    return [entry[0] for entry in driver.log].count(call)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_issued_is_what_was_lowered(name: str) -> None:
    driver, executor, call = bound(name)
    driver.log.clear()
    call()
    issued = driver.decoded({STREAM: 0, executor.reduce_stream: 1}, {})
    reduced = [entry[1] for entry in driver.log if entry[0] == "reduce"]
    plain = [replace(c, local=False) if isinstance(c, CopyAsync) else c for c in lowered(name)]
    assert issued == [call for call in plain if not isinstance(call, ReduceLaunch)]
    assert reduced == [call for call in plain if isinstance(call, ReduceLaunch)]
    assert len(driver.log) == len(plain)


def test_issuing_twice_is_the_same_twice() -> None:
    driver, _, call = bound("all_gather")
    driver.log.clear()
    call()
    once = list(driver.log)
    call()
    assert driver.log == [*once, *once]


def test_reductions_run_at_the_highest_priority() -> None:
    """The lane of reductions is a stream of its own, with the priority that goes first."""
    driver = FakeDriver()
    reductions = Reductions(driver)
    executor, launcher = Executor(driver=driver), summing(reductions)
    executor.bind(lowered("reduce_scatter, chunks"), STREAM, reduction=launcher)
    assert ("cuStreamCreateWithPriority", 1, -5) in driver.log
    assert {stream for _, stream in reductions.bound} == {executor.reduce_stream}


def test_a_reduction_nobody_can_do_is_refused() -> None:
    with pytest.raises(Misconfigured, match="give a `reduction`"):
        Executor(driver=FakeDriver()).bind(lowered("reduce_scatter"), STREAM)


def test_a_graph_is_one_call() -> None:
    """Captured on a stream of the executor's own between begin and end, and launched by one call on any stream."""
    driver = FakeDriver()
    executor = Executor(driver=driver)
    driver.log.clear()
    graph = executor.graph(lowered("all_gather"))
    names = [entry[0] for entry in driver.log]
    assert names[0] == "cuStreamBeginCapture"
    assert names[-3:] == ["cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]
    assert {entry[-1] for entry in driver.log if entry[0] == "cuMemcpyDtoDAsync"} == {executor.side_stream}
    driver.log.clear()
    graph.launch(STREAM)
    assert [(entry[0], entry[2]) for entry in driver.log] == [("cuGraphLaunch", STREAM)]


BASE = 1 << 40  # of the allocation that holds a graph's input


def replaying(driver: FakeDriver, num_bytes: int = 64) -> tuple[Prepared, Callable[[], None]]:
    """A call whose input, `num_bytes` long, lies amid 4,096 bytes; it was issued, and its graph replayed."""
    driver.allocations[BASE] = 4096, 1
    call, tuning = case("all_gather", 3)
    calls = lower(program := plan(call, 1, tuning), ADDRESSES)
    borrowed = [(BASE + 1024, num_bytes)]
    prepared = Prepared(program, calls, Executor(driver=driver), graphs=True, borrowed=borrowed)
    start = partial(prepared.start, STREAM, cast("EventPool", SimpleNamespace(handles={STREAM: STREAM})), 0)
    for _ in range(3):
        start()
    return prepared, start


def launched(driver: FakeDriver) -> list[int]:
    return [entry[1] for entry in driver.log if entry[0] == "cuGraphLaunch"]


@pytest.mark.parametrize("now", [{BASE: (4096, 2)}, {BASE - 4096: (1 << 20, 2)}], ids=["again", "within another"])
def test_a_graph_whose_memory_was_freed_is_captured_anew(now: dict[int, tuple[int, int]]) -> None:
    """Torch freed its cache, and the call's tensors have the old addresses again: the old graph is not replayed."""
    driver = FakeDriver()
    prepared, start = replaying(driver)
    driver.allocations = now
    start()
    start()
    first, second = launched(driver)[1:3]
    assert launched(driver) == [first, first, second, second]
    prepared.close()
    destroyed = [entry[1] for entry in driver.log if entry[0] == "cuGraphExecDestroy"]
    assert destroyed == [first, second] != [first, first]


def test_a_graph_is_kept_while_its_memory_is_there() -> None:
    driver = FakeDriver()
    _, start = replaying(driver)
    driver.allocations[2 * BASE] = 4096, 9  # another one
    start()
    assert len(launched(driver)) == 3
    assert len(set(launched(driver))) == 1


def test_memory_of_several_allocations_is_copied_without_a_graph() -> None:
    """As torch's expandable segments have it: a part in the middle may be freed and made again."""
    driver = FakeDriver()
    replaying(driver, num_bytes=4096)
    assert not launched(driver)
    assert times(driver, "cuMemcpyDtoDAsync") == 3 * 2


def test_a_stale_graph_is_closed_once_though_no_new_one_can_be_captured() -> None:
    driver = FakeDriver()
    prepared, start = replaying(driver)
    driver.allocations[BASE] = 4096, 2
    driver.refuse["cuGraphInstantiate"] = 2
    with pytest.raises(CounterpointError, match="cuGraphInstantiate"):
        start()
    prepared.close()
    assert times(driver, "cuGraphExecDestroy") == 1


def test_a_capture_that_fails_is_ended() -> None:
    """An error while capturing leaves the stream out of the capture, and says what the driver refused."""
    driver = FakeDriver()
    executor = Executor(driver=driver)
    driver.refuse["cuMemcpyDtoDAsync"] = 1
    with pytest.raises(CounterpointError, match="cuMemcpyDtoDAsync failed"):
        executor.graph(lowered("all_gather"))
    assert driver.log[-1][0] == "cuStreamEndCapture"


def test_a_refused_call_stops_the_rest() -> None:
    driver, _, call = bound("all_gather")
    driver.refuse["cuMemcpyDtoDAsync"] = 700
    driver.log.clear()
    with pytest.raises(CounterpointError, match="700; the collective was issued in part"):
        call()
    assert times(driver, "cuMemcpyDtoDAsync") == 1


def test_events_come_back() -> None:
    driver, executor, call = bound("reduce_scatter, chunks")
    call.close()
    made = times(driver, "cuEventCreate")
    executor.bind(lowered("reduce_scatter, chunks"), STREAM, reduction=summing(Reductions(driver)))
    assert times(driver, "cuEventCreate") == made > 0


def test_close_destroys_events() -> None:
    driver, executor, _ = bound("reduce_scatter, chunks")
    executor.close()
    assert times(driver, "cuEventDestroy") == times(driver, "cuEventCreate") > 0


def test_streams_are_made_ahead_and_used_again() -> None:
    """A rank that waits for peers in all of its streams makes none: one, after many, would wait for them all to end."""
    driver = FakeDriver()
    executors = [Executor(driver=driver) for _ in range(50)]
    handles = {int(stream) for each in executors for stream in (each.reduce_stream, each.side_stream)}
    made = times(driver, "cuStreamCreateWithPriority")
    assert len(handles) == 100
    for executor in executors:
        executor.close()
    again = [Executor(driver=driver) for _ in range(50)]
    assert handles >= {int(stream) for each in again for stream in (each.reduce_stream, each.side_stream)}
    assert times(driver, "cuStreamCreateWithPriority") == made


def test_letting_go_sets_every_awaited_word() -> None:
    """A watchdog that gives up frees each wait of the calls, from a stream that waits for nothing."""
    driver = FakeDriver()
    executor = Executor(driver=driver)
    calls = lowered("all_gather")
    executor.let_go(calls)
    written = [entry for entry in driver.log if entry[0] == "cuStreamWriteValue32"]
    assert sorted(entry[2] for entry in written) == list(awaited(calls))
    assert {(entry[1], entry[3]) for entry in written} == {(executor.side_stream, 1)}


def test_a_refusal_while_making_is_unsupported() -> None:
    driver = FakeDriver()
    driver.refuse["cuStreamCreateWithPriority"] = 801
    with pytest.raises(Unsupported, match="cuStreamCreateWithPriority failed: 801"):
        Executor(driver=driver)


@pytest.mark.needs("cuda-bindings")
def test_parameters_are_laid_out_as_the_driver_reads_them() -> None:
    """With the real cuda-bindings: tag, address, value and flags are where `CUstreamBatchMemOpParams` has them."""
    import ctypes
    import struct

    from cuda.bindings import driver

    from counterpoint.collectives.cuda.driver import _parameters
    from counterpoint.collectives.cuda.lower import MemoryOperation, MemoryOperations

    address = 0x7F00_1234_5678
    operations = MemoryOperation("wait", address, 1), MemoryOperation("write", address, 7)
    made = _parameters(driver, MemoryOperations(operations, 0))
    raw = [ctypes.string_at(entry.getPtr(), 32) for entry in made]
    assert [struct.unpack("<I4xQQI", each[:28]) for each in raw] == [(1, address, 1, 0), (2, address, 7, 0)]
