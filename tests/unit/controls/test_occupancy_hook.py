"""The two hooks without a GPU: what Triton's launcher is told, and what CUPTI's callback reads and writes."""

import ctypes
import sys
import types
from typing import Any

import pytest

from counterpoint.controls import launch_hooks as launch_hook
from counterpoint.controls.launch_hooks import no_triton, shaped_launches, shaped_triton
from counterpoint.errors import Unsupported

BY_VALUE, BY_REFERENCE, ENTER, EXIT = 307, 652, 0, 1


class Told:
    """A shaper that always gives one answer, and keeps what it was asked."""

    def __init__(self, answer: int = 5000, *, active: bool = True) -> None:
        self.active, self.answer = active, answer
        self.asked: dict[str, object] = {}

    def dynamic_smem(self, handle: int, **asked: object) -> int:
        self.asked = {"handle": handle} | asked
        return self.answer


class Failing(Told):
    """A shaper that cannot decide."""

    def dynamic_smem(self, handle: int, **asked: object) -> int:
        raise Unsupported("planted")


class Cupti:
    """Stands in for the library: calls back as the driver would, around a launch of given arguments."""

    def __init__(self, *, subscribed: bool = False) -> None:
        self.subscribed = subscribed
        self.refusal = 0
        self.callback: Any = None
        self.during: list[int] = []

    def cuptiSubscribe(self, subscriber: object, callback: Any, user: object) -> int:
        if self.subscribed:
            return 39
        self.subscribed, self.callback = True, callback
        return 0

    def cuptiEnableCallback(self, on: int, subscriber: object, domain: int, call: int) -> int:
        return self.refusal

    def cuptiUnsubscribe(self, subscriber: object) -> int:
        self.subscribed = False
        return 0

    def launch(self, call: int, arguments: ctypes.Structure, config: Any) -> None:
        """One launch: enter, then what the driver would read, then exit."""
        kept = ctypes.c_uint64(77)
        data = launch_hook._CallbackData(
            site=ENTER, symbol=b"kernel_name", parameters=ctypes.addressof(arguments), ours=ctypes.pointer(kept)
        )
        self.callback(None, 1, call, ctypes.pointer(data))
        self.during.append(config.smem)
        data.site = EXIT
        self.callback(None, 1, call, ctypes.pointer(data))


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Cupti:
    library = Cupti()
    monkeypatch.setattr(launch_hook, "_cupti", lambda: library)
    return library


def config(smem: int, *attributes: tuple[int, tuple[int, ...]]) -> Any:
    """A CUlaunchConfig of one block of 128 threads."""
    array = (launch_hook._Attribute * max(len(attributes), 1))()
    for index, (kind, values) in enumerate(attributes):
        array[index].id = kind
        array[index].value[: len(values)] = values
    made = launch_hook._Config(
        grid=(8, 2, 1), block=(128, 1, 1), smem=smem, attributes=ctypes.addressof(array), num_attributes=len(attributes)
    )
    made.held = array  # as the caller would
    return made


def run(cupti: Cupti, call: int, made: Any, shaper: Told) -> int:
    """The shared memory that the driver saw."""
    if call == BY_VALUE:
        arguments: Any = launch_hook._ByValue(function=99, config=made)
        inner = arguments.config
    else:
        arguments = launch_hook._ByReference(config=ctypes.pointer(made), function=99)
        inner = made
    with shaped_launches(shaper):
        cupti.launch(call, arguments, inner)
    return cupti.during[-1]


@pytest.mark.parametrize("call", [BY_VALUE, BY_REFERENCE])
def test_the_driver_reads_what_was_decided(cupti: Cupti, call: int) -> None:
    """For the launch as it is described to the shaper; the caller's structure is put back."""
    made, told = config(100), Told()
    assert run(cupti, call, made, told) == 5000
    assert made.smem == 100
    assert told.asked == {
        "handle": 99, "threads": 128, "dynamic_smem_bytes": 100, "clustered": False, "cooperative": False,
    }  # fmt: skip


def test_inactive_shapers_leave_the_launch_alone_and_others_are_told_of_clusters(cupti: Cupti) -> None:
    assert run(cupti, BY_REFERENCE, config(100), Told(active=False)) == 100
    told = Told()
    run(cupti, BY_REFERENCE, config(0, (6, (1,)), (4, (2, 1, 1)), (2, (1,))), told)
    assert (told.asked["clustered"], told.asked["cooperative"]) == (True, True)


def test_a_failure_is_raised_on_exit_and_leaves_the_launch_alone(cupti: Cupti) -> None:
    """ctypes would print and forget it."""
    with pytest.raises(Unsupported, match="planted"):
        run(cupti, BY_REFERENCE, config(100), Failing())
    assert cupti.during == [100]


def test_the_subscription_ends_with_the_context(cupti: Cupti) -> None:
    """So that a profiler may come next."""
    with shaped_launches(Told()):
        assert cupti.subscribed
    assert not cupti.subscribed


def test_a_second_subscriber_is_refused_by_name(cupti: Cupti) -> None:
    """CUPTI's answer 39 becomes a text that says who it may be."""
    cupti.subscribed = True
    with pytest.raises(Unsupported, match=r"torch\.profiler once it has run, nsys, ncu"), shaped_launches(Told()):
        pass


class Launcher:
    """Triton's launcher, as 3.6 and 3.7 have it: keeps what it was called with."""

    launch_cooperative_grid = False

    def __call__(self, *arguments: object) -> tuple[object, ...]:
        return arguments


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> type[Launcher]:
    launcher = type("CudaLauncher", (Launcher,), {})
    module = types.ModuleType("triton.backends.nvidia.driver")
    module.CudaLauncher = launcher  # type: ignore[attr-defined]
    for name in ("triton", "triton.backends", "triton.backends.nvidia"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", module)
    return launcher


def call(launcher: type[Launcher], packed: object = (4, 1, 24576)) -> Any:
    return launcher()(8, 1, 1, 7, 99, packed, None, "argument")


def test_triton_is_told_more_shared_memory(triton: type[Launcher]) -> None:
    """For the kernel as it is described to the shaper."""
    told = Told()
    with shaped_triton(told):
        assert call(triton, (8, 2, 1024)) == (8, 1, 1, 7, 99, (8, 2, 5000), None, "argument")
    assert told.asked == {
        "handle": 99, "threads": 256, "dynamic_smem_bytes": 1024, "clustered": True, "cooperative": False,
    }  # fmt: skip


def test_an_inactive_shaper_is_not_asked_and_tritons_launcher_is_put_back(triton: type[Launcher]) -> None:
    with shaped_triton(Told(active=False)):
        assert call(triton)[5] == (4, 1, 24576)
    with pytest.raises(ZeroDivisionError), shaped_triton(Told()):
        raise ZeroDivisionError
    assert call(triton)[5] == (4, 1, 24576)


def test_another_launcher_is_not_guessed_at(triton: type[Launcher]) -> None:
    with shaped_triton(Told()), pytest.raises(Unsupported, match="interpose=True"):
        call(triton, (4, 1, 24576, 1, 1))


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton.backends.nvidia.driver", raising=False)
    assert "not installed" in str(no_triton())


def test_a_hook_that_cannot_watch_gives_cupti_back(cupti: Cupti) -> None:
    """CUPTI must not call back into an object that is gone, and the next tool finds it free."""
    cupti.refusal = 15
    with pytest.raises(Unsupported, match="cuptiEnableCallback failed"), shaped_launches(Told()):
        pass
    assert not cupti.subscribed
