"""Zero-SM collectives: programs as data (`program`, `plan`), their proof (`check`), their clock (`simulate`), and what
runs them (`Communicator`, on GPUs and CPUs). Names are loaded when they are first used: the data needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterpoint.collectives.communicator import Communicator, available

__all__ = ["Communicator", "available"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("counterpoint.collectives.communicator"), name)
    raise AttributeError(f"module 'counterpoint.collectives' has no attribute {name!r}")
