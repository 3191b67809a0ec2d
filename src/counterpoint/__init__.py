"""counterpoint: computation and communication at the same time on multi-GPU PyTorch jobs.

    >>> import counterpoint
    >>> result = counterpoint.diagnose("traces/")
    >>> result.diagnosis.verdict

Names are loaded when they are first used: `import counterpoint` costs next to nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from counterpoint.diagnose.api import Result, diagnose
    from counterpoint.errors import BadTrace, CounterpointError, Misconfigured, Unsupported

__all__ = [
    "BadTrace",
    "CounterpointError",
    "Misconfigured",
    "Result",
    "Unsupported",
    "__version__",
    "diagnose",
]

_WHERE = {
    "Result": "counterpoint.diagnose.api",
    "BadTrace": "counterpoint.errors",
    "CounterpointError": "counterpoint.errors",
    "Misconfigured": "counterpoint.errors",
    "Unsupported": "counterpoint.errors",
}


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        return importlib.import_module("counterpoint.diagnose")  # the room is callable: see there
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")
