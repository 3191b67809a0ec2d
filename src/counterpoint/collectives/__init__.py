"""Run zero-SM collectives between the GPUs (or processes) of one host, and over several hosts.

- `communicator.py` is for users: `Communicator` and `available`. `options.py` and `work.py` define its options and the
  handle of an asynchronous call; `connect.py` opens the transport under it.
- `program/` describes a collective as data, without torch; `tests/support/check.py` checks that it is correct.
- `submit/` turns arguments into a `Submission`; `cpu/` and `cuda/` execute it; `host/` and `memory/` serve both.
- `multihost/` composes collectives over several hosts from collectives inside one host and a library between hosts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterpoint.collectives.communicator import Communicator
    from counterpoint.collectives.connect import available

__all__ = ["Communicator", "available"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("counterpoint.collectives.communicator"), name)
    raise AttributeError(f"module 'counterpoint.collectives' has no attribute {name!r}")
