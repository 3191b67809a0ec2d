"""Make the tables of what NCCL's logs say of a job."""

from __future__ import annotations

from counterpoint.records.nccl import NcclReport
from counterpoint.rendering import formatting as say
from counterpoint.rendering.table import Column, Table

ON_TERMINAL = 8  # rows


def nccl_remarks_table(nccl: NcclReport | None) -> Table | None:
    """Return a table of what is wrong by NCCL's logs; None without logs."""
    if nccl is None:
        return None
    return Table(
        title="What NCCL's log says",
        unit=f"NCCL {nccl.version or 'of unknown version'}; "
        + (", ".join(f"{name} {count}" for name, count in nccl.transports.items()) or "no connections logged"),
        columns=(
            Column("problem", of=lambda r: r.title),
            Column("seen in", of=lambda r: r.evidence, limit=600),
            Column("what to do", of=lambda r: r.advice, limit=600),
        ),
        rows=nccl.remarks,
        notes=[] if nccl.remarks else ["Nothing stands out."],
    )


def nccl_tables(nccl: NcclReport | None) -> list[Table]:
    """Return tables of NCCL's communicators and choices, and of bandwidths that NCCL Inspector measured."""
    if nccl is None:
        return []
    communicators = Table(
        title="NCCL's communicators",
        unit="channels: the fewest of a rank",
        columns=(
            Column("number", say.count, lambda c: c.count),
            Column("ranks", say.count, lambda c: c.ranks),
            Column("hosts", say.count, lambda c: c.hosts),
            Column("channels", say.count, lambda c: c.channels),
            Column("NVLS", say.count, lambda c: c.nvls_channels),
            Column("per peer", say.count, lambda c: c.p2p_channels_per_peer),
        ),
        rows=nccl.communicators,
        most=ON_TERMINAL,
    )
    choices = Table(
        title="NCCL's choices",
        unit="by bytes × calls",
        columns=(
            Column("operation", of=lambda c: c.op, limit=40),
            Column("size", say.size, lambda c: c.bytes),
            Column("algorithm", of=lambda c: c.algorithm, limit=60),
            Column("protocol", of=lambda c: c.protocol, limit=20),
            Column("channels", say.count, lambda c: c.channels),
            Column("calls", say.count, lambda c: c.calls),
        ),
        rows=nccl.choices,
        most=ON_TERMINAL,
    )
    bandwidths = Table(
        title="Bandwidths by NCCL Inspector",
        unit="medians; GB/s of the bus, and of the slowest rank",
        columns=(
            Column("operation", of=lambda b: b.op, limit=40),
            Column("size", say.size, lambda b: b.bytes),
            Column("ranks", say.count, lambda b: b.ranks),
            Column("calls", say.count, lambda b: b.calls),
            Column("ms", say.milliseconds, lambda b: b.time_us),
            Column("GB/s", say.bandwidth, lambda b: b.bus_gb_per_s),
            Column("slowest", say.bandwidth, lambda b: b.slowest_gb_per_s),
        ),
        rows=nccl.bandwidths,
        most=ON_TERMINAL,
    )
    return [table for table in (communicators, choices, bandwidths) if table.rows]
