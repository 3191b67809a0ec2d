"""What a torch process group (NCCL, gloo) does between hosts: one phase of a call over several hosts."""

from __future__ import annotations

from typing import Any

from counterpoint.collectives.program import Call
from counterpoint.errors import Misconfigured

__all__ = ["start"]


def start(call: Call, output: Any, input: Any, *, group: Any, op: str = "sum") -> list[Any]:
    """Starts `call` among the ranks of `group` and returns torch's works, which all have to be waited for.

    Args:
        call: over the group's ranks; of a send_recv each rank sends to at most one other.
        output: its piece of memory, contiguous; of a call in place the same as `input`.
        input: likewise.
        group: torch process group.
        op: of reductions: sum, max or min.

    Raises:
        Misconfigured: an operation that no phase has.
    """
    import torch.distributed as dist

    match call.operation:
        case "send_recv":
            return _exchanged(call, output, input, group)
        case "all_reduce":
            return [dist.all_reduce(output, getattr(dist.ReduceOp, op.upper()), group, async_op=True)]
        case "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
            return [scatter(output, input, getattr(dist.ReduceOp, op.upper()), group, async_op=True)]
        case "broadcast":
            return [dist.broadcast(output, group_src=call.root, group=group, async_op=True)]
        case "barrier":
            return [dist.barrier(group, async_op=True)]
    raise Misconfigured(f"{call.operation} between hosts: no phase has it")


def _exchanged(call: Call, output: Any, input: Any, group: Any) -> list[Any]:
    """Straight from where it is to where it belongs, in one batch."""
    import torch.distributed as dist

    me = dist.get_rank(group)
    sends = [peer for peer, size in enumerate(call.sizes[me]) if size]
    receives = [peer for peer, row in enumerate(call.sizes) if row[me]]
    return list(
        dist.batch_isend_irecv(
            [
                *(dist.P2POp(dist.isend, input, group=group, group_peer=peer) for peer in sends),
                *(dist.P2POp(dist.irecv, output, group=group, group_peer=peer) for peer in receives),
            ]
        )
    )
