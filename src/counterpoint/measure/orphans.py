"""No rank outlives the process that started it, whatever ends that process."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["PARENT_VARIABLE", "die_with_parent"]

PARENT_VARIABLE = "COUNTERPOINT_PARENT_PID"  # set by launch; a rank that torchrun started does without

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; call it first, before torch is imported.

    Nothing in this process is asked: it works in the middle of a collective, and when the parent got SIGKILL.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
