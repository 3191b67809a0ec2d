"""Predict how long replicas exchange gradients (with zero also parameters), and how much of that is exposed.

Compute is cut into n equal pieces, as many as buckets or layers, and a collective follows (or precedes) each piece:

    reduced behind backward       b/n + (n - 1) · together(b/n, c/n) + c/n        the last bucket is always exposed
    gathered ahead of forward     c/n + (n - 1) · together(f/n, c/n) + f/n        the first layer is always exposed
    not overlapped                b + c
    asynchronous                  max(c - all compute of the step, 0)             no rank waits for another

together: `pair/together.py`. Copies of FSDP2, which run on SMs: the gathered buffer into parameters (2 bytes in and out
each), gradients into the buffer that is reduced (`chunk_cat`: 1.9 TB/s where it makes float32 of bfloat16, as in
`samples/fsdp-healthy`, 3.8 TB/s where it does not), shards from float32 and back. Layers are gathered one ahead; more
(`Parallel.prefetch`) takes memory and, on 8 × H200, saved no time that could be measured.

    zero          sent per step                                           source
    0             all_reduce of gradients in buckets                      arXiv 2006.15704
    1             reduce_scatter of gradients, all_gather of parameters   arXiv 1910.02054
    2             the same, gradients of every micro-batch
    3             all_gather before forward (and before backward with reshard_after_forward), reduce_scatter after
                  backward, each layer by itself, for every micro-batch   arXiv 2304.11277

Compressed gradients are sent smaller; what a step gains in communication it pays in passes over memory and in small
matrix products. Whether the job still converges, and after how many more steps, is not modelled: `NOTE` is printed with
every figure that uses this.

| method | what is sent, N elements of b bytes, n ranks | source |
|---|---|---|
| powersgd | all_reduce of r (rows + columns) elements for each matrix, vectors whole | arXiv 1905.13727, alg. 1 and 2 |
| topk | all_gather of k N values and as many 32-bit indices from each rank | arXiv 1712.01887 |
| randomk | all_reduce of k N values: the ranks draw the same indices from a shared seed | arXiv 1809.07599 |
| quantized | all_to_all of N · bits / 8 and scales in a node, of its sums between nodes (qgZ) | arXiv 2306.10209 |
| | all_gather of what was reduced: replicas need whole gradients | |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Disturbance
from counterpoint.pair.together import kept_us
from counterpoint.plan.compute.operations import MemoryBoundOp
from counterpoint.plan.compute.roofline import GpuRates, total_us
from counterpoint.plan.job.cluster import ClusterGpu
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import ParameterCount
from counterpoint.plan.job.parallel import Compression
from counterpoint.plan.network.estimate import MeshTimes
from counterpoint.plan.network.group import Axis
from counterpoint.records import Record

NOTE = "convergence is not modelled: a step that sends less is not worth as much as a whole one"
INDEX_BYTES = SCALE_BYTES = 4
SELECT_PASSES = 5  # over the gradients for the k-th largest: radix select reads 32-bit keys 4 times, and marks once

Shapes = Sequence[tuple[int, int]]
CollectiveTime = tuple[str, float]
"""PyTorch's name, and µs alone."""


class CommTime(Record, frozen=True, kw_only=True):
    """Holds the communication time of one step, alone and exposed."""

    alone_us: float = 0.0  # all collectives, one after another
    exposed_us: float = 0.0  # time not hidden by compute, plus the time by which it slows compute down


class Sent(NamedTuple):
    """Holds the operation and the bytes of one collective of compressed gradients."""

    operation: str  # PyTorch's name
    num_bytes: float  # of the full array
    among: Literal["all", "node", "nodes"] = "all"  # ranks of the group; those in one node; one of each node


class CompressedExchange(Record, frozen=True, kw_only=True):
    """Describes the compressed exchange that replaces one all_reduce of the gradients."""

    sent: tuple[Sent, ...]  # one after another
    encode_us: float  # before the collectives
    decode_us: float  # after the collectives


def overlapped_in_pieces_us(
    compute_us: float, comms: Sequence[CollectiveTime], pieces: float, mechanism: Disturbance, *, persistent: bool
) -> float:
    """Return the µs of compute and collectives in equal pieces; collectives overlap a neighbouring piece's compute.

    `compute_us` and `comms` are each side alone, and the result is at most their sum. A piece is a layer or a bucket;
    the last bucket counts as a fraction, since with whole buckets time would fall where more bytes begin another one.
    `persistent`: matmuls hold their SMs to their end.
    """
    parts = tuple((name, us / pieces) for name, us in comms)
    alone = sum(us for _, us in parts)
    if not alone:
        return compute_us
    piece = compute_us / pieces
    middle = kept_us(piece, parts, mechanism, persistent=persistent)
    return min(piece + (pieces - 1) * middle + alone, compute_us + pieces * alone)


def layer_collectives(
    job: Job, prices: MeshTimes, count: ParameterCount, element: int
) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """Return the forward and the backward collectives that zero 3 runs for a layer, or for embedding and head.

    `count` parameters are gathered at once, in `element` bytes each.
    """

    def alone_us(axis: Axis, operation: str, num_bytes: float) -> float:
        return prices.find(axis, operation, num_bytes).us

    gathered, gradients = _collectives(job, prices, count, alone_us, element)
    return gathered, [*(gathered if job.parallel.reshard_after_forward else []), *gradients]


def layer_copies_us(job: Job, rates: GpuRates, count: ParameterCount, element: int) -> tuple[float, float]:
    """Return the µs of FSDP2's copies of `count` parameters and their gradients, in forward and in backward.

    Unsharded layers are copied out of the all_gather's buffer, gradients into the reduce_scatter's, unless the
    mechanism sends every byte to where it belongs; the rank's shard is cast to the `element` bytes in which it is
    gathered, and back.
    """
    made, gradient = job.training.element_bytes, job.training.grad_bytes
    shard = count.total / (job.parallel.dp * job.parallel.cp)
    gather = [MemoryBoundOp(name="cast", num_bytes=(4.0 + element) * shard)] if element < 4 else []
    scatter = [MemoryBoundOp(name="cast back", num_bytes=(gradient + 4.0) * shard)] if gradient < 4 else []
    if job.disturbance_of("dp").copies:
        gather.append(MemoryBoundOp(name="copy of the shard", num_bytes=2.0 * element * shard))
        gather.append(MemoryBoundOp(name="copy out", num_bytes=2.0 * element * count.total))
        into = (made + gradient) * count.total
        scatter.append(MemoryBoundOp(name="copy in", num_bytes=into, strided=gradient != made))
    again = gather if job.parallel.reshard_after_forward else []
    return total_us(tuple(gather), rates), total_us((*again, *scatter), rates)


def _collectives(
    job: Job, prices: MeshTimes, count: ParameterCount, alone_us: Callable[[Axis, str, float], float], element: int
) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """Return the collectives of parameters and of gradients, with all_reduces over ranks that hold the same shard."""
    gathered, gradients = [], []
    for axis, replicas, parameters in _sharded_axes(job, count):
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


def _sharded_axes(job: Job, count: ParameterCount) -> list[tuple[Axis, tuple[Axis, ...], float]]:
    """Return (axis, axes that replicate shards, parameters) for each mesh axis that shards or reduces parameters."""
    found: list[tuple[Axis, tuple[Axis, ...], float]] = []
    if count.shared:
        whole = job.parallel.shard is None or job.parallel.zero == 0
        found.append(("dp_cp", (), count.shared) if whole else ("shard", ("replicate", "cp"), count.shared))
    if count.experts:
        found.append(("expert_dp", (), count.experts))
    return found


def replica_exchange(
    job: Job, rates: GpuRates, prices: MeshTimes, count: ParameterCount, *, forward_us: float, backward_us: float,
    host_us: float,
) -> CommTime:  # fmt: skip
    """Return the time (zero 0 to 2) to reduce gradients after backward and to gather parameters before forward.

    The stage that ends last has `count` parameters, and takes `forward_us` and `backward_us` for a micro-batch. Its
    host takes `host_us` longer, which may hide collectives in either direction and is not divided between both: a
    longer kernel could shift it to where it hides more communication.
    """
    _check_whole(job)
    if job.training.local_steps > 1:
        return _averaged(job, prices, count)
    if job.compression is not None:
        return _compressed(job, prices, count)

    def in_buckets_us(axis: Axis, operation: str, num_bytes: float) -> float:
        buckets = max(num_bytes / job.parallel.bucket_bytes, 1.0)
        return buckets * prices.find(axis, operation, num_bytes / buckets).us

    gathered, gradients = _collectives(job, prices, count, in_buckets_us, job.training.element_bytes)
    times = job.training.micro_batches(job.parallel) if job.parallel.zero == 2 else 1
    alone_us = times * sum(us for _, us in gradients) + sum(us for _, us in gathered)
    beyond_us = max(alone_us - job.training.micro_batches(job.parallel) * (forward_us + backward_us + host_us), 0.0)
    if job.training.asynchronous:
        return CommTime(alone_us=alone_us, exposed_us=beyond_us)
    if not job.parallel.overlap_dp:
        return CommTime(alone_us=alone_us, exposed_us=alone_us)
    mechanism, persistent = job.disturbance_of("dp"), rates.efficiency.persistent
    pieces = max(count.total * job.training.grad_bytes / job.parallel.bucket_bytes, 1.0)

    def exposed_us(comms: Sequence[CollectiveTime], compute_us: float) -> float:
        return overlapped_in_pieces_us(compute_us, comms, pieces, mechanism, persistent=persistent) - compute_us

    behind, ahead = exposed_us(gradients, backward_us + host_us), exposed_us(gathered, forward_us + host_us)
    return CommTime(alone_us=alone_us, exposed_us=max(times * behind + ahead, beyond_us))


def _compressed(job: Job, prices: MeshTimes, count: ParameterCount) -> CommTime:
    """Return the time to compress, send and decompress gradients, all of it exposed after the last backward."""
    if job.compression is None or job.parallel.zero:
        raise Misconfigured(
            f"parallel.zero = {job.parallel.zero} with compression: it is for whole gradients; give zero = 0"
        )
    us, rows, columns = 0.0, job.model.hidden, max(job.model.hidden // job.parallel.tp, 1)
    for axis, _, parameters in _sharded_axes(job, count):
        shapes = [(rows, columns)] * max(round(parameters / rows / columns), 1)  # all matrices are about as flat
        small = compress(
            job.compression, shapes, ranks=prices.groups[axis].ranks, in_node=prices.in_node(axis),
            element_bytes=job.training.grad_bytes, gpu=job.cluster.gpu, precision=job.training.precision,
        )  # fmt: skip
        if prices.groups[axis].ranks > 1:
            us += small.encode_us + small.decode_us
            us += sum(_sent_us(prices, axis, each) for each in small.sent)
    return CommTime(alone_us=us, exposed_us=us)


def _sent_us(prices: MeshTimes, axis: Axis, sent: Sent) -> float:
    """Return the µs of one collective of compressed gradients in the groups of an axis."""
    group, in_node = prices.groups[axis], prices.in_node(axis)
    if sent.among == "node":
        return prices.between(in_node, group.stride, sent.operation, sent.num_bytes)
    if sent.among == "nodes":
        return prices.between(group.ranks // in_node, group.stride * in_node, sent.operation, sent.num_bytes)
    return prices.find(axis, sent.operation, sent.num_bytes).us


def _check_whole(job: Job) -> None:
    """Raise Misconfigured where local SGD or asynchronous replicas are used with zero, compression or each other."""
    training = job.training
    apart = f"training.local_steps = {training.local_steps}" if training.local_steps > 1 else ""
    apart = apart or ("training.asynchronous = true" if training.asynchronous else "")
    both = training.local_steps > 1 and training.asynchronous
    if apart and (job.parallel.zero or job.compression is not None or both):
        raise Misconfigured(
            f"{apart} with parallel.zero = {job.parallel.zero}{' and asynchronous' if both else ''}"
            f"{' and compression' if job.compression else ''}: replicas keep whole parameters; give zero = 0 alone"
        )


def _averaged(job: Job, prices: MeshTimes, count: ParameterCount) -> CommTime:
    """Return local SGD's communication per step: it averages parameters every `local_steps` (arXiv 1805.09767)."""
    size = {axis: parameters * job.training.grad_bytes for axis, _, parameters in _sharded_axes(job, count)}
    us = sum(prices.find(axis, "all_reduce", num_bytes).us for axis, num_bytes in size.items())
    us /= job.training.local_steps
    return CommTime(alone_us=us, exposed_us=us)


def compress(
    how: Compression, shapes: Shapes, *, ranks: int, in_node: int = 1, element_bytes: int, gpu: ClusterGpu,
    precision: str = "bf16",
) -> CompressedExchange:  # fmt: skip
    """Return the collectives of a rank's compressed gradients, and the µs to encode and to decode them.

    `shapes` has (rows, columns) of every gradient on this rank; a vector is (N, 1). `ranks` reduce together, `in_node`
    of them in one node. The times are a lower bound, since thin matrices reach neither: that of memory, or of
    powersgd's products at the peak of `precision` if that is longer.
    """
    whole = float(_elements(shapes) * element_bytes)
    sent, encoding, decoding = _compressed_bytes(how, shapes, (ranks, in_node), element_bytes)
    if how.error_feedback:
        encoding += 2 * whole
    flops = _powersgd_flops(how.rank, shapes) if how.method == "powersgd" else (0.0, 0.0)
    return CompressedExchange(
        sent=tuple(sent),
        encode_us=_longer_us(encoding, flops[0], gpu, precision),
        decode_us=_longer_us(decoding, flops[1], gpu, precision),
    )


def _compressed_bytes(
    how: Compression, shapes: Shapes, group: tuple[int, int], element_bytes: int
) -> tuple[list[Sent], float, float]:
    """Return a compression method's collectives, and the bytes that encoding and decoding read and write."""
    elements, (ranks, in_node) = _elements(shapes), group
    whole = float(elements * element_bytes)
    match how.method:
        case "powersgd":
            return _powersgd(how, shapes, element_bytes)
        case "topk":
            kept = how.keep * elements
            sent = [Sent("all_gather", ranks * kept * (element_bytes + INDEX_BYTES))]
            encoding, decoding = SELECT_PASSES * whole, whole + ranks * kept * element_bytes
        case "randomk":
            kept_bytes = how.keep * whole
            sent, encoding, decoding = [Sent("all_reduce", kept_bytes)], 2 * kept_bytes, whole + kept_bytes
        case "quantized":
            small = elements * how.bits / 8 + elements / how.block * SCALE_BYTES
            sent, between = [Sent("all_to_all", small), Sent("all_gather", small)], 0.0
            if 1 < in_node < ranks:
                inside = [Sent("all_to_all", small, "node"), Sent("all_to_all", small / in_node, "nodes")]
                sent, between = [*inside, sent[1]], 2 * (whole + small) / in_node  # sums of a node: quantized, too
            # quantize; reduce what came, quantize the own shard
            encoding, decoding = whole + small + 2 * small + whole / ranks + between, small + whole
    return sent, encoding, decoding


def _elements(shapes: Shapes) -> int:
    return sum(rows * columns for rows, columns in shapes)


def _powersgd(how: Compression, shapes: Shapes, element_bytes: int) -> tuple[list[Sent], float, float]:
    """Return PowerSGD's collectives and bytes: all_reduce of P, then Q; gradients too small to factor go with P."""
    low, whole = _divided(how.rank, shapes)
    p = sum(rows for rows, _ in low) * how.rank * element_bytes
    q = sum(columns for _, columns in low) * how.rank * element_bytes
    rest = sum(rows * columns for rows, columns in whole) * element_bytes
    matrices = float(sum(rows * columns for rows, columns in low) * element_bytes)
    sent = [Sent("all_reduce", float(p + rest)), Sent("all_reduce", float(q))]
    return sent, 2 * matrices + 3 * p + q, matrices + p + q  # M Q; orthogonalise; M^T P; then P Q^T


def _powersgd_flops(rank: int, shapes: Shapes) -> tuple[float, float]:
    """Return PowerSGD's FLOPs to encode (M Q, M^T P, Gram-Schmidt on P) and to decode (P Q^T)."""
    low, _ = _divided(rank, shapes)
    product = sum(2.0 * rows * columns * rank for rows, columns in low)
    return 2 * product + sum(2.0 * rows * rank**2 for rows, _ in low), product


def _divided(rank: int, shapes: Shapes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the gradients' shapes that two factors of rank `rank` make smaller, and all other shapes."""
    low = [(rows, columns) for rows, columns in shapes if rank * (rows + columns) < rows * columns]
    return low, [(rows, columns) for rows, columns in shapes if rank * (rows + columns) >= rows * columns]


def _longer_us(num_bytes: float, flops: float, gpu: ClusterGpu, precision: str) -> float:
    if flops and precision not in gpu.tflops:
        raise Misconfigured(f"{gpu.name} has no figure for {precision}: give one of {', '.join(sorted(gpu.tflops))}")
    compute = flops / (gpu.tflops[precision] * 1e6) if flops else 0.0
    return max(num_bytes / (gpu.memory_gb_per_s * 1e3), compute)
