"""Find, measure and fix communication that does not overlap with computation in multi-GPU PyTorch jobs.

    >>> import counterpoint
    >>> result = counterpoint.diagnose("traces/")
    >>> result.diagnosis.verdict
    >>> counterpoint.measure("quick").rows[0].hidden
    >>> counterpoint.tune("pairs.toml").pair[0].mechanism  # the choice for a pair of a step, and why
    >>> counterpoint.overlap(model)  # an FSDP2, DDP or tensor-parallel model: its collectives then need no SMs
    >>> with counterpoint.watch(every=500):  # diagnoses a training while it runs
    ...     train()

`import counterpoint` loads only the exceptions, never torch; every other name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from counterpoint.errors import BadTrace, CounterpointError, Misconfigured, NoEffect, PeerTimeout, Unsupported
from counterpoint.version import VERSION

if TYPE_CHECKING:
    from counterpoint.diagnosis.api import Result, diagnose
    from counterpoint.measurement.api import measure
    from counterpoint.monitoring.api import watch
    from counterpoint.parallel import ddp
    from counterpoint.parallel import expert as expert_parallel
    from counterpoint.parallel import tensor as tensor_parallel
    from counterpoint.parallel.backend.group import report
    from counterpoint.parallel.backend.symmetric import symmetric_memory
    from counterpoint.parallel.overlap import overlap
    from counterpoint.records.measurement import Measurement
    from counterpoint.tuning.api import tune

__version__ = VERSION

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
    "ddp",
    "diagnose",
    "expert_parallel",
    "measure",
    "overlap",
    "report",
    "symmetric_memory",
    "tensor_parallel",
    "tune",
    "watch",
]

_SUBMODULES = ("ddp", "expert_parallel", "tensor_parallel")
_MODULES = {
    "Measurement": "counterpoint.records.measurement",
    "Result": "counterpoint.diagnosis.api",
    "diagnose": "counterpoint.diagnosis.api",
    "measure": "counterpoint.measurement.api",
    "overlap": "counterpoint.parallel.overlap",
    "report": "counterpoint.parallel.backend.group",
    "symmetric_memory": "counterpoint.parallel.backend.symmetric",
    "tune": "counterpoint.tuning.api",
    "watch": "counterpoint.monitoring.api",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
