"""The GPUs that CUDA would show to a process of ours, without torch."""

from __future__ import annotations

from counterpoint.errors import Unsupported
from counterpoint.machine.blind import Blind
from counterpoint.machine.driver import Driver

__all__ = ["visible_gpus"]


def visible_gpus() -> tuple[str, ...]:
    """Names by CUDA's ordinals, after CUDA_VISIBLE_DEVICES; makes no context.

    Raises:
        Unsupported: there is no driver, or it does not start; the text has its reason.
    """
    try:
        driver = Driver()
        return tuple(driver.name(ordinal) for ordinal in range(driver.device_count()))
    except Blind as reason:
        raise Unsupported(str(reason)) from None
