"""Use a torch process group: exchange values between its ranks, agree on errors, and run collectives by torch.

Every function is called by all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from counterpoint.collectives.program.calls import Call, Span
from counterpoint.collectives.program.operations import find_operation
from counterpoint.errors import Misconfigured, Unsupported

T = TypeVar("T")


class PeerFailed(Unsupported):
    """Is raised on a rank that cannot go on because another rank raised; the message has that rank's error."""


def membership(group: Any) -> tuple[int, int]:
    """Return this process's rank in `group` and the group's size; raise if the process is not in the group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise Misconfigured("there is no process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise Misconfigured("this process is not in the group: only its ranks make a communicator")
    return rank, dist.get_world_size(group)


def gather_values(group: Any, value: T) -> list[T]:
    """Return the values that all ranks passed, in the order of ranks; all ranks call it together."""
    import torch.distributed as dist

    values: list[Any] = [None] * membership(group)[1]
    dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(group: Any, options: Mapping[str, object]) -> None:
    """Raise Misconfigured on every rank if `options` differ between ranks."""
    first, *others = gather_values(group, options)
    for rank, theirs in enumerate(others, start=1):
        differ = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if differ:
            said = [{name: each.get(name) for name in differ} for each in (first, theirs)]
            raise Misconfigured(
                f"the ranks do not match: {said[0]} on rank 0, {said[1]} on rank {rank}; give all the same"
            )


def raise_together(group: Any, action: Callable[[], T]) -> T:
    """Return the result of `action`; if it raises on any rank, every rank raises, so that none waits for ever.

    Raises:
        PeerFailed: `action` raised on another rank only.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    texts = gather_values(group, None if error is None else str(error))
    if error is not None:
        raise error
    failed = next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None), None)
    if failed is not None:
        raise PeerFailed(failed)
    return result


def torch_function(operation: str) -> Any:
    """Return torch's function for a collective, under the newest name that this torch has, as older names warn."""
    import torch.distributed as dist

    return next(getattr(dist, name) for name in find_operation(operation).torch_names if hasattr(dist, name))


def start_by_torch(
    call: Call, output: Any, input: Any, *, group: Any, op: str = "sum", async_op: bool = True
) -> list[Any]:
    """Return torch's `Work` objects after starting `call` by torch.distributed; without `async_op` an empty list.

    The tensors are flat and contiguous; `input` is None if the collective has one tensor, `op` sum, avg, max or min. A
    collective for which torch has no function is sent block by block, in one batch.
    """
    import torch.distributed as dist

    row = find_operation(call.operation)
    if not row.torch_names:
        return _start_blocks(call, output, input, group, async_op)
    function = torch_function(call.operation)
    tensors = [tensor for name, tensor in (("output", output), ("input", input)) if name in row.arguments]
    options: dict[str, Any] = {}
    if "op" in row.arguments:
        options["op"] = getattr(dist.ReduceOp, op.upper())
    if "root" in row.arguments:
        options["group_src"] = call.root
    work = function(*tensors, group=group, async_op=async_op, **options)
    return [] if work is None else [work]


def _start_blocks(call: Call, output: Any, input: Any, group: Any, async_op: bool) -> list[Any]:
    """Send every block by torch's point-to-point operations, from the input straight to its place in the output."""
    import torch.distributed as dist

    me, peers = dist.get_rank(group), [rank for rank in range(call.world_size) if rank != dist.get_rank(group)]

    def piece(span: Span) -> Any:
        flat = output if span.buffer == "output" else input
        size = flat.element_size()
        return flat[span.offset // size : (span.offset + span.num_bytes) // size]

    sends = [(peer, call.source_span(me, peer)) for peer in peers if call.sizes[me][peer]]
    receives = [(peer, call.target_span(peer, me)) for peer in peers if call.sizes[peer][me]]
    if call.own == "copy" and call.sizes[me][me]:
        piece(call.target_span(me, me)).copy_(piece(call.source_span(me, me)))
    operations = [
        *(dist.P2POp(dist.isend, piece(span), group=group, group_peer=peer) for peer, span in sends),
        *(dist.P2POp(dist.irecv, piece(span), group=group, group_peer=peer) for peer, span in receives),
    ]
    works = list(dist.batch_isend_irecv(operations)) if operations else []
    for work in () if async_op else works:
        work.wait()
    return works if async_op else []
