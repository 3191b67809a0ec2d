"""Look at what runs: which kernels, on how many SMs, and whether every control did what it was asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from counterpoint.controls.captured import captured_kernels
from counterpoint.controls.control import Control, Lanes
from counterpoint.controls.nccl_cluster import NcclCluster
from counterpoint.controls.what_ran import sides_of_all, sm_ids, with_clusters
from counterpoint.errors import Unsupported
from counterpoint.machine.occupancy import SmLimits, blocks_per_sm, waves
from counterpoint.measure.mechanisms import Opened
from counterpoint.measure.rows import Watched
from counterpoint.measure.session import Session
from counterpoint.records.evidence import Evidence, Seen
from counterpoint.records.measurement import Usage

__all__ = ["usage_of", "watch", "watch_compute"]


def watch(session: Session, opened: Sequence[Opened], stock: Opened) -> list[Watched]:
    """What was seen of each mechanism on this rank's GPU, the pair launched together as it is timed.

    All ranks call it. Usage is rank 0's view; a control that failed on any rank marks the row.

    Args:
        session: this rank.
        opened: the mechanisms.
        stock: the same pair without any control.
    """
    if not session.is_cuda:
        return [Watched() for _ in opened]
    for each in opened:
        each.comm.reset()
    try:
        seen = session.together(lambda: _seen(session, opened, stock))
    except Unsupported as error:
        return [Watched(marked=f"nobody could look at what ran: {error}") for _ in opened]
    limits = sm_limits(session.device)
    return [_judged(session, each.mechanism.controls, one, limits) for each, one in zip(opened, seen, strict=True)]


def watch_compute(session: Session, settings: Sequence[tuple[Lanes, Sequence[Control]]], stock: Lanes) -> list[Watched]:
    """The same for a computation alone, under each setting."""
    if not session.is_cuda:
        return [Watched() for _ in settings]
    lanes = [stock, *(lanes for lanes, _ in settings)]
    try:
        without, *found = (compute for compute, _ in session.together(lambda: sides_of_all(lanes, session.device)))
    except Unsupported as error:
        return [Watched(marked=f"nobody could look at what ran: {error}") for _ in settings]
    limits = sm_limits(session.device)
    return [
        _judged(session, controls, Seen(compute=compute, compute_without=without), limits)
        for (_, controls), compute in zip(settings, found, strict=True)
    ]


def _judged(session: Session, controls: Sequence[Control], seen: Seen, limits: SmLimits) -> Watched:
    everyone = session.gather(tuple(control.verify(seen) for control in controls))
    evidence = tuple(_worst(proofs) for proofs in zip(*everyone, strict=True))
    failed = [proof for proof in evidence if not proof.took_effect]
    marked = "; ".join(f"{proof.control} had no effect: asked {proof.asked}, saw {proof.seen}" for proof in failed)
    return Watched(usage=usage_of(seen, limits), evidence=evidence, marked=marked or None)


def _worst(proofs: Sequence[Evidence]) -> Evidence:
    """The first rank's that failed, else rank 0's."""
    return next((proof for proof in proofs if not proof.took_effect), proofs[0])


def _seen(session: Session, opened: Sequence[Opened], stock: Opened) -> list[Seen]:
    """Each mechanism beside the stock pair, all under one profiler."""
    watched = [stock, *opened]
    sides = sides_of_all([each.lanes for each in watched], session.device)
    if any(isinstance(control, NcclCluster) for each in opened for control in each.mechanism.controls):
        sides = [
            (compute, with_clusters(comm, captured_kernels(each.lanes.comm, device=session.device)))
            for each, (compute, comm) in zip(watched, sides, strict=True)
        ]
    (compute_without, comm_without), *found = sides
    return [
        Seen(
            compute=compute,
            comm=comm,
            compute_without=compute_without,
            comm_without=comm_without,
            compute_sms=sm_ids(each.lanes.compute_stream) if each.mechanism.controls else None,
            comm_sms=sm_ids(each.lanes.comm_stream) if each.mechanism.controls else None,
        )
        for each, (compute, comm) in zip(opened, found, strict=True)
    ]


def sm_limits(device: torch.device) -> SmLimits:
    """What one SM of the device holds, as torch reports it."""
    found = torch.cuda.get_device_properties(device)
    return SmLimits(
        num_sms=found.multi_processor_count,
        regs=getattr(found, "regs_per_multiprocessor", 65536),
        smem=found.shared_memory_per_multiprocessor,
        threads=found.max_threads_per_multi_processor,
    )


def usage_of(seen: Seen, limits: SmLimits) -> Usage:
    """Blocks and SMs of each side, and the waves of the longest compute kernel alone and beside the collective."""
    ctas = max((launched.num_blocks for launched in seen.comm), default=0)
    kernels = [launched for launched in seen.compute if launched.kind == "kernel" and launched.block is not None]
    if not kernels:
        return Usage(comm_ctas=ctas)
    longest = max(kernels, key=lambda kernel: kernel.duration_us)
    assert longest.block is not None
    resident = blocks_per_sm(
        threads=longest.block[0] * longest.block[1] * longest.block[2],
        regs_per_thread=longest.regs_per_thread or 0,
        smem_bytes=longest.smem_bytes or 0,
        sm=limits,
    )
    blocks = longest.num_blocks
    return Usage(
        compute_blocks=blocks,
        compute_blocks_per_sm=resident,
        compute_sms=min(limits.num_sms, -(-blocks // resident)),
        comm_ctas=ctas,
        waves_alone=waves(blocks, num_sms=limits.num_sms, blocks_per_sm=resident),
        waves_together=waves(blocks, num_sms=limits.num_sms - ctas, blocks_per_sm=resident),
    )
