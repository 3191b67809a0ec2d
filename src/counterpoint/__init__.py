"""counterpoint: computation and communication at the same time on multi-GPU PyTorch jobs.

    >>> import counterpoint
    >>> result = counterpoint.diagnose("traces/")
    >>> result.diagnosis.verdict
    >>> counterpoint.measure("quick").rows[0].hidden

Names are loaded when they are first used: `import counterpoint` costs next to nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from counterpoint.diagnose.api import Result, diagnose
    from counterpoint.errors import BadTrace, CounterpointError, Misconfigured, NoEffect, PeerTimeout, Unsupported
    from counterpoint.measure.api import measure
    from counterpoint.records import Measurement

__all__ = [
    "BadTrace",
    "CounterpointError",
    "Measurement",
    "Misconfigured",
    "NoEffect",
    "PeerTimeout",
    "Result",
    "Unsupported",
    "__version__",
    "diagnose",
    "measure",
]

_WHERE = {
    "Result": "counterpoint.diagnose.api",
    "BadTrace": "counterpoint.errors",
    "CounterpointError": "counterpoint.errors",
    "Measurement": "counterpoint.records",
    "Misconfigured": "counterpoint.errors",
    "NoEffect": "counterpoint.errors",
    "PeerTimeout": "counterpoint.errors",
    "Unsupported": "counterpoint.errors",
}

_VERBS = {"diagnose", "measure"}


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return importlib.import_module(f"counterpoint.{name}")  # the room is callable: see there
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")
