"""Zero-SM collectives between the GPUs (or processes) of a host, and over several hosts.

- `communicator.py` is for users: `Communicator` and `available`; `options.py` and `work.py` are its options and result,
  `connect.py` opens it.
- `program/` and `proof/` need no torch: a collective as data, and the check that it is right.
- `submit/` turns arguments into a submission; `cpu/` and `cuda/` carry it out; `host/` and `memory/` serve both.
- `multihost/` composes collectives of several hosts.
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
