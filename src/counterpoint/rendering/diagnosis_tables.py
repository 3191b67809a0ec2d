"""Make the tables of a diagnosis: time by kind, idle time, collectives, late ranks, kernels, what-ifs.

Totals are shown **per step** (the mean over the analysed steps), because users notice the time of a step; data frames
and JSON keep the sums.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from counterpoint.records.diagnosis import (
    Account,
    Collective,
    CollectiveKind,
    Diagnosis,
    IdleCause,
    KernelComparison,
    RankAccount,
    Replay,
    WhatIfStep,
    ranks_in_words,
)
from counterpoint.rendering import formatting as say
from counterpoint.rendering.nccl_tables import nccl_tables
from counterpoint.rendering.table import UNKNOWN, BarPart, Cell, Column, LengthBar, Table, TableRow, Tone, row

PARTS = {  # of a rank's time, which add up to its duration
    "compute": "compute alone",
    "overlapped": "compute + communication",
    "transfer": "transfer",
    "wait": "wait",
    "memcpy": "copies",
    "idle": "idle",
}
_UNEQUAL_SHARE = 0.02  # of the mean step: a note says by how much more the steps of ranks differ
MAX_IDLE_CAUSES = 6
LATE_FIRST_FROM = 16  # ranks: in longer tables the late ones come first
ON_TERMINAL = 8  # collectives, kernels, late ranks
MAX_COLLECTIVES = 300
MAX_KINDS = 24
MAX_KERNELS = 100
MAX_HEAT = 16  # ranks, up to which each rank's wait has its own column


def verbose_tables(diagnosis: Diagnosis) -> list[Table]:
    """Return all tables of a diagnosis except the ranks' time budgets (`budget_table`)."""
    made = (
        idle_table(diagnosis),
        kinds_table(diagnosis),
        collectives_table(diagnosis),
        stragglers_table(diagnosis),
        kernels_table(diagnosis),
        replay_table(diagnosis),
        *nccl_tables(diagnosis.nccl),
    )
    return [table for table in made if table is not None]


def steps_in(diagnosis: Diagnosis) -> int:
    """Return the number of analysed steps, at least 1, by which sums are divided for means per step."""
    return max(1, len(diagnosis.steps))


def late_ranks(diagnosis: Diagnosis) -> set[int]:
    """Return the ranks that make others wait."""
    return {rank for straggler in diagnosis.stragglers for rank in straggler.ranks}


def budget(account: Account) -> dict[str, float]:
    """Return the µs of each of `PARTS`; they add up to the account's duration, since copies get the rest."""
    wait = min(account.exposed_wait_us or 0.0, account.exposed_comm_us)
    copies = account.duration_us - account.compute_us - account.exposed_comm_us - account.idle_us
    return {
        "compute": account.compute_us - account.overlapped_us,
        "overlapped": account.overlapped_us,
        "transfer": account.exposed_comm_us - wait,
        "wait": wait,
        "memcpy": max(0.0, copies),
        "idle": account.idle_us,
    }


def worst_ranks(accounts: Sequence[RankAccount], limit: int, late: Container[int] = ()) -> list[RankAccount]:
    """Return at most `limit` accounts, of late ranks and then of ranks with least compute, in order of rank."""
    if len(accounts) <= limit:
        return list(accounts)
    worst = sorted(
        accounts,
        key=lambda a: (a.rank not in late, a.compute_us / a.duration_us if a.duration_us else 0.0, a.rank),
    )[:limit]
    return sorted(worst, key=lambda a: a.rank)


def budget_table(diagnosis: Diagnosis, limit: int) -> Table | None:
    """Return a table of each rank's time by part, for at most `limit` ranks, and below it the mean over all ranks."""
    if not diagnosis.per_rank:
        return None
    late, steps = late_ranks(diagnosis), steps_in(diagnosis)
    shown = worst_ranks(diagnosis.per_rank, limit, late)
    if len(shown) > LATE_FIRST_FROM:
        shown.sort(key=lambda account: account.rank not in late)
    longest = max(account.duration_us for account in shown)
    untold = bool(diagnosis.missing_ranks) or any(a.exposed_wait_us is None for a in diagnosis.per_rank)
    untold = untold and diagnosis.totals.exposed_comm_us > 0
    legend = PARTS | {"transfer": "transfer or wait"} if untold else PARTS

    def line(rank: object, account: Account, tone: Tone = "") -> TableRow:
        us = budget(account)
        wait = None if account.exposed_wait_us is None and us["transfer"] else us["wait"]
        ms = [None if part is None else part / steps for part in (us["compute"] + us["overlapped"], us["overlapped"],
              wait, us["transfer"], us["memcpy"], us["idle"], account.duration_us)]  # fmt: skip
        parts = [
            BarPart(look=key, share=part / longest, says=f"{legend[key]}: {say.milliseconds(part / steps)} ms")
            for key, part in us.items()
            if part > 0 and longest > 0
        ]
        return row(rank, LengthBar(parts), *ms, account.hidden, account.comm_to_compute, tone=tone)

    notes = []
    if len(shown) < len(diagnosis.per_rank):
        notes.append(f"{len(shown)} of {len(diagnosis.per_rank)} ranks: the late, and the ranks that compute least.")
    shortest, mean = (us / steps for us in (min(a.duration_us for a in shown), diagnosis.totals.duration_us))
    if mean > 0 and max(longest / steps - mean, mean - shortest) > _UNEQUAL_SHARE * mean:
        notes.append(
            f"The ranks' steps take {say.milliseconds(shortest)} to {say.milliseconds(longest / steps)} ms; "
            f"{say.milliseconds(mean)} ms is the mean."
        )
    return Table(
        title="Where the time goes",
        unit="ms per step, mean" if diagnosis.has_steps else "ms, the whole trace",
        columns=(
            Column("rank", str),
            Column("", is_bar=True),
            Column("compute", say.tenth_milliseconds),
            Column("of it\noverlapped", say.tenth_milliseconds, page_only=True),
            Column("wait", say.tenth_milliseconds),
            Column("transfer\nor wait" if untold else "transfer", say.tenth_milliseconds),
            Column("copies", say.tenth_milliseconds),
            Column("idle", say.tenth_milliseconds),
            Column("step", say.tenth_milliseconds, page_only=True),
            Column("hidden", say.percent),
            Column("comm /\ncompute", say.factor, page_only=True),
        ),
        rows=[
            *(line(each.rank, each, "strong" if each.rank in late else "") for each in shown),
            *([line("mean", diagnosis.totals, "quiet")] if len(diagnosis.per_rank) > 1 else []),
        ],
        legend=list(legend.items()),
        notes=notes,
    )


def idle_sentence(diagnosis: Diagnosis) -> str:
    """Return a sentence on the GPUs' idle time per step: how long, and how much of that the trace explains."""
    idle = diagnosis.idle
    if idle is None:
        return "Idle: unknown"
    text = f"Idle {say.milliseconds(idle.idle_us)} ms {'a step' if diagnosis.has_steps else 'in the recording'}"
    text += f", of which {say.milliseconds(idle.explained_us)} explained"
    rest = idle.idle_us - idle.explained_us
    return f"{text}; the trace does not hold why for the other {say.milliseconds(rest)}" if rest >= 5.0 else text


def idle_causes(diagnosis: Diagnosis) -> list[IdleCause]:
    """Return the largest causes of idle time, without those that would be shown as 0.00 ms."""
    causes = diagnosis.idle.causes if diagnosis.idle else ()
    return [c for c in causes if c.us >= 5.0][:MAX_IDLE_CAUSES]


def idle_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of idle time by cause, longest first, with the operations that the host ran meanwhile."""
    causes = idle_causes(diagnosis)
    if not causes:
        return None
    unit = ("ms per step" if diagnosis.has_steps else "ms") + (", mean over ranks" if len(diagnosis.ranks) > 1 else "")
    return Table(
        title=idle_sentence(diagnosis),
        unit=unit,
        columns=(
            Column("cause", of=lambda c: say.IDLE_CAUSES[c.category]),
            Column("ms", say.milliseconds, lambda c: c.us),
            Column("gaps", say.whole, lambda c: c.count if c.count >= 1 else "<1"),
            Column("longest", say.milliseconds, lambda c: c.longest_us),
            Column("mostly in", of=_mostly_in, limit=60),
        ),
        rows=causes,
    )


def _mostly_in(cause: IdleCause) -> Cell:
    most = cause.operations[0].name if cause.operations else None
    times = (f"{each.name} {say.milliseconds(each.us)}" for each in cause.operations[:3])
    return Cell(value=most, note=", ".join(times))


def group_of(kind: CollectiveKind) -> str:
    """Return the name of a collective's group: its parallel axis if known, else its name in the trace; and its size."""
    name = kind.parallel or kind.group_name or kind.group
    return f"{name} ×{kind.ranks}" if kind.ranks else name


def kinds_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of collectives by operation, group, size and phase."""
    if not diagnosis.collective_kinds:
        return None
    kinds, steps = diagnosis.collective_kinds, steps_in(diagnosis)
    more = [f"The {MAX_KINDS} most exposed of {len(kinds)} kinds."] if len(kinds) > MAX_KINDS else []
    unknown = (
        "Where ranks have no trace, transfer (and so GB/s) may hold waiting. What the links carry is unknown for GPUs "
        "that the data sheets do not list, and where a group may be on several hosts."
    )
    return Table(
        title="Collectives by kind",
        unit="ms: exposed a step, wait and transfer a call; GB/s: of the bus, the best of the group, of the link",
        columns=(
            Column("kind", of=lambda k: k.op, limit=40),
            Column("group", of=group_of, limit=24),
            Column("size", say.size, lambda k: k.bytes),
            Column("calls", say.whole, lambda k: k.count / steps),
            Column("exposed", say.milliseconds, lambda k: k.exposed_us),
            Column("wait", say.milliseconds, lambda k: k.wait_us),
            Column("transfer", say.milliseconds, lambda k: k.transfer_us),
            Column("GB/s", say.bandwidth, lambda k: k.bus_gb_per_s),
            Column("best", say.bandwidth, lambda k: k.best_gb_per_s, optional=True),
            Column("link", say.bandwidth, lambda k: k.link_gb_per_s, optional=True),
            Column("phase", of=lambda k: k.phase, optional=True),
        ),
        rows=kinds[:MAX_KINDS],
        notes=[*more, unknown],
        most=ON_TERMINAL,
    )


def by_exposed(collectives: Sequence[Collective], limit: int) -> list[Collective]:
    """Return the `limit` collectives with the longest exposed time, worst first."""
    return sorted(collectives, key=lambda c: (-c.exposed_us, c.start_us))[:limit]


def waits(collective: Collective) -> tuple[float | None, float | None]:
    """Return the mean and longest wait (µs) of ranks in a collective; (None, None) if no rank's wait is known."""
    known = [us for us in collective.wait_us.values() if us is not None]
    return (sum(known) / len(known), max(known)) if known else (None, None)


def collectives_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of the most exposed collectives; on a page also each rank's wait, if ranks are few."""
    if not diagnosis.collectives:
        return None
    shown = by_exposed(diagnosis.collectives, MAX_COLLECTIVES)
    ranks = diagnosis.ranks if len(diagnosis.ranks) <= MAX_HEAT else ()
    longest = max((waits(c)[1] or 0.0 for c in shown), default=0.0) or 1.0
    notes = []
    if len(shown) < len(diagnosis.collectives):
        notes = [
            f"The {len(shown)} most exposed of {len(diagnosis.collectives)} collectives; --json and the data frames "
            "hold all."
        ]

    def wait_of(rank: int) -> Column:
        def of(c: Collective) -> Cell:
            us = c.wait_us.get(str(rank))
            return Cell(value=us, heat=(us or 0.0) / longest)

        return Column(f"wait {rank}", say.milliseconds, of, page_only=True)

    return Table(
        title="Collectives",
        unit="ms each, by exposed time; wait of a rank: how long it was in before the last one came",
        columns=(
            Column("collective", of=lambda c: f"{c.op} #{c.index}", limit=60),
            Column("group", of=lambda c: c.group, limit=24),
            Column("size", say.size, lambda c: c.bytes),
            Column("CTAs", say.count, lambda c: c.num_ctas if c.num_ctas != 0 else "copy engines", page_only=True),
            Column("exposed", say.milliseconds, lambda c: c.exposed_us),
            Column("mean\nwait", say.milliseconds, lambda c: waits(c)[0]),
            Column("longest\nwait", say.milliseconds, lambda c: waits(c)[1]),
            Column("transfer", say.milliseconds, lambda c: c.transfer_us),
            Column("GB/s", say.bandwidth, lambda c: c.bus_gb_per_s),
            Column("last", say.count, lambda c: None if waits(c)[0] is None else c.last_rank),
            *map(wait_of, ranks),
        ),
        rows=shown,
        notes=notes,
        most=ON_TERMINAL,
    )


def stragglers_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of the ranks that make others wait, worst first."""
    if not diagnosis.stragglers:
        return None
    steps = steps_in(diagnosis)
    return Table(
        title="Ranks that make others wait",
        unit="lateness in ms per step",
        columns=(
            Column("ranks", of=lambda s: ranks_in_words(s.ranks)),
            Column("late", say.milliseconds, lambda s: s.delay_us / steps),
            Column("times\nlast", say.count, lambda s: s.times_last),
            Column("cause", of=lambda s: say.CAUSES[s.cause] + (f" ({s.detail})" if s.detail else "")),
            Column("evidence", of=lambda s: s.evidence, limit=1200),
        ),
        rows=diagnosis.stragglers,
        most=ON_TERMINAL,
    )


def waves(kernel: KernelComparison) -> str:
    """Return a kernel's waves of thread blocks, alone and during communication, as `2 → 3`."""
    if kernel.waves_alone is None or kernel.waves_overlapped is None:
        return UNKNOWN
    return f"{kernel.waves_alone} → {kernel.waves_overlapped}"


def kernels_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of the kernels that are slower beside communication, by cost."""
    slowed = sorted((k for k in diagnosis.kernels if k.cause != "none"), key=lambda kernel: -kernel.cost_us)
    if not slowed:
        return None
    steps, undisturbed = steps_in(diagnosis), len(diagnosis.kernels) - len(slowed)
    notes = [f"{undisturbed} kind{'s' * (undisturbed != 1)} of kernel ran undisturbed."]
    if len(slowed) > MAX_KERNELS:
        notes.insert(0, f"The {MAX_KERNELS} costliest of {len(slowed)} slowed kernels.")
    return Table(
        title="Kernels slowed by communication",
        unit="median ms, cost in ms per step",
        columns=(
            Column("kernel", of=lambda k: Cell(value=k.name, note=(k.shapes or "")[:100]), limit=160),
            Column("blocks", say.count, _blocks, page_only=True),
            Column("alone", say.fine_milliseconds, _alone),
            Column("beside", say.fine_milliseconds, _beside),
            Column("slower", say.factor, lambda k: k.slowdown),
            Column("waves", of=waves),
            Column("comm\nCTAs", say.count, _comm_ctas, page_only=True),
            Column("cost", say.milliseconds, lambda k: k.cost_us / steps),
            Column("cause", of=lambda k: say.KERNEL_CAUSES[k.cause]),
        ),
        rows=slowed[:MAX_KERNELS],
        notes=notes,
        most=ON_TERMINAL,
    )


def _blocks(k: KernelComparison) -> Cell:
    return Cell(value=math.prod(k.grid), note=" × ".join(map(str, k.grid)))


def _alone(k: KernelComparison) -> Cell:
    return Cell(value=k.alone_us, note=_spread(k.alone_p10_us, k.alone_p90_us, k.alone_count))


def _beside(k: KernelComparison) -> Cell:
    return Cell(value=k.overlapped_us, note=_spread(k.overlapped_p10_us, k.overlapped_p90_us, k.overlapped_count))


def _spread(p10_us: float | None, p90_us: float | None, times: int) -> str:
    return f"{say.milliseconds(p10_us)} to {say.milliseconds(p90_us)}, n {times}"


def _comm_ctas(k: KernelComparison) -> Cell:
    most = k.comm_ctas_without_extra_wave
    note = "" if most is None else f"no extra wave up to {most}" if most else "any adds a wave"
    return Cell(value=k.comm_ctas, note=note)


def replayed_waits(replay: Replay) -> str | None:
    """Return a sentence on the waits that a replay keeps as measured; None if the replay explains all waits."""
    kept = []
    if replay.collective_waits in ("as_measured", "partly_joined"):
        some = "some " if replay.collective_waits == "partly_joined" else ""
        kept.append(f"in {some}collectives, for other ranks have no trace")
    if replay.waits == "as_measured":
        kept.append("of operations that begin later than the trace explains")
    return f"Waits kept as measured: {'; '.join(kept)}." if kept else None


def replayed_steps(diagnosis: Diagnosis) -> str:
    """Return text that says how many steps the replay covers; empty if the replay covers all steps."""
    replayed, every = diagnosis.replay.steps if diagnosis.replay else None, len(diagnosis.steps)
    return f", mean of {replayed} of {every} steps" if replayed and replayed < every else ""


def replay_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of each what-if's replayed step, with the speed-up over the unchanged replay."""
    replay = diagnosis.replay
    if replay is None:
        return None
    unchanged = WhatIfStep(name="unchanged", step_us=replay.replayed_us)
    longest = max(replay.measured_us, replay.replayed_us, *(case.step_us for case in replay.what_if)) or 1.0

    def bar(case: WhatIfStep) -> LengthBar:
        return LengthBar([BarPart(look="unchanged" if case is unchanged else "case", share=case.step_us / longest)])

    def speed_up(case: WhatIfStep) -> float | None:
        return replay.replayed_us / case.step_us if case.step_us > 0 else None

    error = (
        f"The unchanged replay takes {say.milliseconds(replay.replayed_us)} ms where "
        f"{say.milliseconds(replay.measured_us)} ms were measured: an error of {say.change(replay.error)}."
    )
    return Table(
        title="What it is worth",
        unit=f"step replayed, ms{replayed_steps(diagnosis)}",
        columns=(
            Column("replay", of=lambda case: case.name),
            Column("", of=bar, is_bar=True, optional=True),
            Column("step", say.milliseconds, lambda case: case.step_us),
            Column("speed-up", say.factor, speed_up),
        ),
        rows=[unchanged, *replay.what_if],
        notes=[error, *filter(None, [replayed_waits(replay)])],
    )
