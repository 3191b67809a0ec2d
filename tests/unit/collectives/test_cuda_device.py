"""In which context a thread calls the driver: that of torch's current device, or for the time of a call the GPU's."""

import threading

import torch

from counterpoint.collectives.cuda.device import Gpu
from tests.support.software_gpu import SoftwareDriver

THIS, OTHER = 1, 0


def gpu(current_device: int) -> Gpu:
    """GPU 1 of a process without any, where torch's current device is this one."""
    made = Gpu.__new__(Gpu)
    made.device, made.driver = torch.device("cuda", THIS), SoftwareDriver()
    made._context, made._thread, made._current_device = 0, threading.local(), lambda: current_device
    return made


def test_a_thread_of_this_device_gets_its_context() -> None:
    one = gpu(THIS)
    assert (one.is_current(), one.driver.has_context()) == (True, True)


def test_a_thread_of_another_device_is_lent_the_context() -> None:
    one = gpu(OTHER)
    before = one.is_current(), one.driver.has_context()
    with one.current():
        inside = one.driver.has_context()
    assert (before, inside, one.driver.has_context()) == ((False, False), True, False)


def test_a_context_that_a_thread_has_is_kept() -> None:
    """Such as a green context of the same GPU."""
    one = gpu(THIS)
    one.driver.cuCtxPushCurrent(7)
    one.is_current()
    assert one.driver.cuCtxGetCurrent() == (0, 7)
