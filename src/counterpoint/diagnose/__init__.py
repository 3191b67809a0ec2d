"""Why does my step wait? The accounts, waits, slow-downs and causes in traces of one job.

`counterpoint.diagnose` is this room and its verb at once: `counterpoint.diagnose("traces/")` calls `api.diagnose`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from counterpoint.diagnose.api import diagnose

        return diagnose(*args, **options)


sys.modules[__name__].__class__ = _Room
