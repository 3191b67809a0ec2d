"""Show where something was measured: the machine in one line, and all known properties as a table."""

from __future__ import annotations

from counterpoint.records.measurement import Environment
from counterpoint.rendering.table import Column, Table, row


def machine_line(where: Environment) -> str:
    """Return GPUs and versions in one line: `8 × NVIDIA H200 · torch 2.11.0 · NCCL 2.28.9`."""
    nccl = [f"NCCL {where.nccl}"] if where.nccl else []
    return " · ".join([f"{where.world_size} × {where.gpu or where.device}", f"torch {where.torch}", *nccl])


def environment_table(title: str, where: Environment, unit: str = "", **more: str) -> Table:
    """Return a table of the known properties of the machine and the call, and of `more` by name."""
    versions = {"driver": where.driver, "torch": where.torch, "NCCL": where.nccl, "counterpoint": where.counterpoint}
    facts = {
        "device": f"{where.world_size} × {where.gpu or where.device}",
        "software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": (where.commit or "")[:12],
        "command": " ".join(where.command),
        "date": where.date,
        **more,
        "variables": " ".join(f"{name}={value}" for name, value in sorted(where.variables.items())),
    }
    rows = [row(name, value) for name, value in facts.items() if value]
    return Table(title=title, unit=unit, columns=(Column(""), Column("", limit=600)), rows=rows)
