"""Define the frozen records that subpackages exchange and that `--json` prints, one file per subcommand.

diagnosis.py has those of `diagnose` and `watch`, nccl.py of NCCL's logs, hang.py of `diagnose` for a hang,
measurement.py of `measure` and of the controls that it checks, prediction.py of `plan`, doctor.py of `doctor`,
tuning.py of `tune`, rehearsal.py of `rehearse`; their base class is here. causes.py has the words of causes,
and toml.py writes values as TOML.
Import records from these files. Records import nothing of the code that makes them. Keys may be added to a schema,
never renamed.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Serves as base of immutable records that compare by value and that `msgspec.json` reads and writes."""
