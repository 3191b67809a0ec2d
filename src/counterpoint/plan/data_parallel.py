"""Gradients (and with zero parameters) of replicas: how long they are sent, and what of it compute hides.

Compute is cut into n equal pieces, as many as buckets or layers, and a collective follows (or precedes) each piece:

    reduced behind backward       b/n + (n - 1) · together(b/n, c/n) + c/n        the last bucket is always exposed
    gathered ahead of forward     c/n + (n - 1) · together(f/n, c/n) + f/n        the first layer is always exposed
    not overlapped                b + c
    asynchronous                  max(c - all compute of the step, 0)             nobody waits for anybody

together: `overlap.py`. Copies of FSDP2, which run on SMs: the gathered buffer into parameters (2 bytes in and out
each), gradients into the buffer that is reduced (`chunk_cat`: 1.9 TB/s where it makes float32 of bfloat16, as in
`samples/fsdp-healthy`, 3.8 TB/s where it does not), shards from float32 and back. Layers are gathered one ahead; more
(`Parallel.prefetch`) takes memory and, on 8 × H200, saved no time that could be measured.

    zero          sent per step                                           source
    0             all_reduce of gradients in buckets                      arXiv 2006.15704
    1             reduce_scatter of gradients, all_gather of parameters   arXiv 1910.02054
    2             the same, gradients of every micro-batch
    3             all_gather before forward (and before backward with reshard_after_forward), reduce_scatter after
                  backward, each layer by itself, for every micro-batch   arXiv 2304.11277
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from counterpoint.errors import Misconfigured
from counterpoint.plan.compression import compress
from counterpoint.plan.compute_cost import Machine, total_us
from counterpoint.plan.groups import Axis
from counterpoint.plan.job import Job
from counterpoint.plan.layers import Traffic
from counterpoint.plan.overlap import Mechanism, find_mechanism, together_us
from counterpoint.plan.parameters import Held
from counterpoint.plan.prices import MeshPrices
from counterpoint.records.base import Record

__all__ = ["Collective", "Reduced", "in_pieces_us", "layer_collectives", "layer_copies_us", "reduced"]

Collective = tuple[str, float]
"""PyTorch's name, and µs alone."""


class Reduced(Record, frozen=True, kw_only=True):
    """Of one step.

    Args:
        alone_us: all collectives, one after another.
        exposed_us: of that, what compute does not hide, with what it slows compute down.
    """

    alone_us: float = 0.0
    exposed_us: float = 0.0


def in_pieces_us(
    compute_us: float, comms: Sequence[Collective], pieces: int, mechanism: Mechanism, *, persistent: bool
) -> float:
    """Compute and collectives, both in `pieces` equal parts, one part of either apart."""
    parts = tuple((name, us / pieces) for name, us in comms)
    alone = sum(us for _, us in parts)
    if not alone:
        return compute_us
    piece = compute_us / pieces
    middle = together_us(piece, parts, mechanism, persistent=persistent)
    return min(piece + (pieces - 1) * middle + alone, compute_us + pieces * alone)


def layer_collectives(job: Job, prices: MeshPrices, held: Held) -> tuple[list[Collective], list[Collective]]:
    """zero 3: those of forward, and those of backward, of one layer or end."""

    def alone_us(axis: Axis, operation: str, num_bytes: float) -> float:
        return prices.find(axis, operation, num_bytes).us

    gathered, gradients = _collectives(job, prices, held, alone_us)
    return gathered, [*(gathered if job.parallel.reshard_after_forward else []), *gradients]


def layer_copies_us(job: Job, machine: Machine, held: Held) -> tuple[float, float]:
    """zero 3: copies of one layer, forward and backward; none where one rank has everything.

    Of whole layers, unless every byte is sent from where it is to where it belongs: out of the gathered buffer, and
    gradients into that which is reduced. Of the own shard: to the dtype in which it is gathered (and from there into
    the buffer), and gradients back to float32.
    """
    element, gradient = 4 if job.training.precision == "fp32" else 2, job.training.grad_bytes
    copies = find_mechanism(job.mechanism).copies
    shard = held.total / (job.parallel.dp * job.parallel.cp)
    gather = [Traffic(name="cast", num_bytes=(4.0 + element) * shard)] if element < 4 else []
    scatter = [Traffic(name="cast back", num_bytes=(gradient + 4.0) * shard)] if gradient < 4 else []
    if copies:
        gather.append(Traffic(name="copy of the shard", num_bytes=2.0 * element * shard))
        gather.append(Traffic(name="copy out", num_bytes=2.0 * element * held.total))
        into = (element + gradient) * held.total
        scatter.append(Traffic(name="copy in", num_bytes=into, strided=gradient != element))
    again = gather if job.parallel.reshard_after_forward else []
    return total_us(tuple(gather), machine), total_us((*again, *scatter), machine)


def _collectives(
    job: Job, prices: MeshPrices, held: Held, alone_us: Callable[[Axis, str, float], float]
) -> tuple[list[Collective], list[Collective]]:
    """Of parameters and of gradients. Replicas of shards add up what each of them has reduced."""
    element = 4 if job.training.precision == "fp32" else 2
    gathered, gradients = [], []
    for axis, replicas, parameters in _spread(job, held):
        size = parameters * job.training.grad_bytes
        if job.parallel.zero == 0:
            gradients.append(("all_reduce", alone_us(axis, "all_reduce", size)))
            continue
        gathered.append(("all_gather", alone_us(axis, "all_gather", parameters * element)))
        gradients.append(("reduce_scatter", alone_us(axis, "reduce_scatter", size)))
        part = size / prices.groups[axis].ranks
        gradients += [
            ("all_reduce", alone_us(other, "all_reduce", part)) for other in replicas if prices.groups[other].ranks > 1
        ]
    return gathered, gradients


def _spread(job: Job, held: Held) -> list[tuple[Axis, tuple[Axis, ...], float]]:
    """Axis over which something is sharded or reduced, axes of its replicas, parameters."""
    found: list[tuple[Axis, tuple[Axis, ...], float]] = []
    if held.shared:
        whole = job.parallel.shard is None or job.parallel.zero == 0
        found.append(("dp_cp", (), held.shared) if whole else ("shard", ("replicate", "cp"), held.shared))
    if held.experts:
        found.append(("expert_dp", (), held.experts))
    return found


def reduced(
    job: Job, machine: Machine, prices: MeshPrices, held: Held, *, forward_us: float, backward_us: float
) -> Reduced:
    """zero 0 to 2: gradients behind the last backward (zero 2: behind each), parameters ahead of the first forward.

    Args:
        held: of the stage that ends last.
        forward_us, backward_us: of that stage and one micro-batch.
    """
    _check_whole(job)
    if job.training.local_steps > 1:
        return _averaged(job, prices, held)
    if job.compression is not None:
        return _compressed(job, prices, held)

    def in_buckets_us(axis: Axis, operation: str, num_bytes: float) -> float:
        buckets = max(round(num_bytes / job.parallel.bucket_bytes), 1)
        return buckets * prices.find(axis, operation, num_bytes / buckets).us

    gathered, gradients = _collectives(job, prices, held, in_buckets_us)
    times = job.training.micro_batches(job.parallel) if job.parallel.zero == 2 else 1
    alone_us = times * sum(us for _, us in gradients) + sum(us for _, us in gathered)
    if job.training.asynchronous:
        compute_us = job.training.micro_batches(job.parallel) * (forward_us + backward_us)
        return Reduced(alone_us=alone_us, exposed_us=max(alone_us - compute_us, 0.0))
    if not job.parallel.overlap_dp:
        return Reduced(alone_us=alone_us, exposed_us=alone_us)
    mechanism, persistent = find_mechanism(job.mechanism), machine.efficiency.persistent
    pieces = max(round(held.total * job.training.grad_bytes / job.parallel.bucket_bytes), 1)
    behind = in_pieces_us(backward_us, gradients, pieces, mechanism, persistent=persistent) - backward_us
    ahead = in_pieces_us(forward_us, gathered, pieces, mechanism, persistent=persistent) - forward_us
    return Reduced(alone_us=alone_us, exposed_us=times * behind + ahead)


def _compressed(job: Job, prices: MeshPrices, held: Held) -> Reduced:
    """All at once after the last backward: encode, send, decode (`compression.py`); passes over memory count as sent.

    Raises:
        Misconfigured: gradients that are not whole on every rank.
    """
    if job.compression is None or job.parallel.zero:
        raise Misconfigured(
            f"parallel.zero = {job.parallel.zero} with compression: it is for whole gradients; give zero = 0"
        )
    us = 0.0
    for axis, _, parameters in _spread(job, held):
        small = compress(
            job.compression, _shapes(job, parameters), ranks=prices.groups[axis].ranks,
            element_bytes=job.training.grad_bytes, gpu=job.cluster.gpu, precision=job.training.precision,
        )  # fmt: skip
        if prices.groups[axis].ranks > 1:
            us += small.encode_us + small.decode_us
            us += sum(prices.find(axis, sent.operation, sent.num_bytes).us for sent in small.sent)
    return Reduced(alone_us=us, exposed_us=us)


def _check_whole(job: Job) -> None:
    """Raises Misconfigured where replicas that do not wait for each other would need parts of each other."""
    training = job.training
    apart = f"training.local_steps = {training.local_steps}" if training.local_steps > 1 else ""
    apart = apart or ("training.asynchronous = true" if training.asynchronous else "")
    both = training.local_steps > 1 and training.asynchronous
    if apart and (job.parallel.zero or job.compression is not None or both):
        raise Misconfigured(
            f"{apart} with parallel.zero = {job.parallel.zero}{' and asynchronous' if both else ''}"
            f"{' and compression' if job.compression else ''}: replicas keep whole parameters; give zero = 0 alone"
        )


def _averaged(job: Job, prices: MeshPrices, held: Held) -> Reduced:
    """Local SGD (arXiv 1805.09767): parameters averaged each so many-th step, nothing beside; the part of one step."""
    size = {axis: parameters * job.training.grad_bytes for axis, _, parameters in _spread(job, held)}
    us = sum(prices.find(axis, "all_reduce", num_bytes).us for axis, num_bytes in size.items())
    us /= job.training.local_steps
    return Reduced(alone_us=us, exposed_us=us)


def _shapes(job: Job, parameters: float) -> list[tuple[int, int]]:
    """As many hidden × hidden / tp matrices as there are parameters: all matrices are about as flat as these."""
    rows, columns = job.model.hidden, max(job.model.hidden // job.parallel.tp, 1)
    return [(rows, columns)] * max(round(parameters / rows / columns), 1)
