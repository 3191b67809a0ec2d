"""Write the records of `watch` for other tools: lines of JSON, TensorBoard, Prometheus.

An exporter is a function of one `WatchedStep`; any callable will do. They run on rank 0, in a thread beside the
training.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Unsupported
from counterpoint.records.diagnosis import WatchedStep


def numbers(record: WatchedStep) -> dict[str, float]:
    """Return the figures of a record by name: times in seconds, shares from 0 to 1, as Prometheus recommends.

    Unknown figures are left out; where no rank is late, `late_seconds` is 0.
    """
    found = {
        "step_seconds": record.step_us / 1e6,
        "exposed_communication_seconds": record.exposed_comm_us / 1e6,
        "idle_seconds": record.idle_us / 1e6,
        "late_seconds": (record.late_us or 0.0) / 1e6,
    }
    return found if record.hidden is None else found | {"hidden_ratio": record.hidden}


class JsonLines:
    """Appends each record to a file, as one line of JSON."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, record: WatchedStep) -> None:
        """Append a record."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")


class Prometheus:
    """Writes the last record to a file for node_exporter's textfile collector; each record replaces the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, record: WatchedStep) -> None:
        """Replace the file by one with this record."""
        late = "" if record.late_rank is None else f'{{rank="{record.late_rank}",cause="{record.late_cause}"}}'
        gauges = numbers(record) | {"watched_step": record.step, "watched_timestamp_seconds": record.unix_s}
        lines = []
        for name, value in gauges.items():
            labels = late if name == "late_seconds" else ""
            lines += [f"# TYPE counterpoint_{name} gauge", f"counterpoint_{name}{labels} {value}"]
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")  # the collector reads *.prom only
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(self.path)


class TensorBoard:
    """Adds figures, and the log line as text, to the TensorBoard run in a folder, or to a given `SummaryWriter`."""

    def __init__(self, run: object) -> None:
        if isinstance(run, str | os.PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise Unsupported("this exporter needs the package tensorboard: pip install tensorboard") from None
            run = SummaryWriter(os.fspath(run))
        self.writer: Any = run

    def __call__(self, record: WatchedStep) -> None:
        """Add a record's figures and log line to the run."""
        for name, value in numbers(record).items():
            self.writer.add_scalar(f"counterpoint/{name}", value, record.step)
        self.writer.add_text("counterpoint/watch", record.line, record.step)
        self.writer.flush()
