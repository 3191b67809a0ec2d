"""Run a computation and a collective alone, one after the other and together; say what each lost and why.

`counterpoint.measure` is this room and its verb at once: `counterpoint.measure("quick")` calls `api.measure`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from counterpoint.measure.api import measure

        return measure(*args, **options)


sys.modules[__name__].__class__ = _Room
