"""Export the `WatchedStep` records of `watch` to JSON lines, TensorBoard or Prometheus.

An exporter is any callable that takes one `WatchedStep`. Exporters run on rank 0, in a thread beside the training.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Unsupported
from counterpoint.records.diagnosis import WatchedStep


def numbers(record: WatchedStep) -> dict[str, float]:
    """Return the numbers of a `WatchedStep` by name: times in seconds, shares as fractions, as Prometheus recommends.

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
    """Appends each `WatchedStep` to a file, as one line of JSON."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, record: WatchedStep) -> None:
        """Append a record to the file."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")


class Prometheus:
    """Writes the latest `WatchedStep` to a file for node_exporter's textfile collector, replacing earlier ones."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, record: WatchedStep) -> None:
        """Replace the file by a file with only this record."""
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
    """Adds each `WatchedStep`'s numbers and log line to TensorBoard, in a folder or by a given `SummaryWriter`."""

    def __init__(self, run: object) -> None:
        if isinstance(run, str | os.PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise Unsupported("this exporter needs the package tensorboard: pip install tensorboard") from None
            run = SummaryWriter(os.fspath(run))
        self.writer: Any = run

    def __call__(self, record: WatchedStep) -> None:
        """Add a record's numbers and log line to TensorBoard."""
        for name, value in numbers(record).items():
            self.writer.add_scalar(f"counterpoint/{name}", value, record.step)
        self.writer.add_text("counterpoint/watch", record.line, record.step)
        self.writer.flush()
