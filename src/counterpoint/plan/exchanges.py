"""What the ranks of a group send each other for one layer and micro-batch, as data: operations and bytes, no times.

A = micro_batch · sequence / cp · hidden · bytes of an element; blocks are attention and feed-forward, two per layer.

    axis          forward, per block             backward, per block                                   source
    tp            all_reduce A                   all_reduce A, beside dW                               arXiv 1909.08053
    tp, sequence  all_gather A, reduce_scatter A all_gather A twice, reduce_scatter A beside dW         arXiv 2205.05198
    cp            all_gather of keys and values  all_gather, reduce_scatter                            arXiv 2407.21783
    ep            all_to_all of the tokens' activations, there and back, both ways                     arXiv 2006.16668
    pp            send_recv of A / tp per stage; without sequence parallelism gathered again over tp   arXiv 2104.04473

Backward, the gradient of a block's input is on its way while dW is made (`Parallel.overlap_tp`). The second all_gather
is of that input, which is kept in parts only: dW needs it, so it does not run beside dW and counts as exposed. Keys and
values of cp are gathered before attention starts: exposed, as Llama 3 does it.
"""

from __future__ import annotations

from typing import Literal

from counterpoint.plan.groups import Axis
from counterpoint.plan.layers import Share
from counterpoint.plan.model import Experts, Model
from counterpoint.plan.parallel import Parallel, Training
from counterpoint.records.base import Record

__all__ = ["CollectiveName", "Exchange", "layer_exchanges", "send"]

CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]


class Exchange(Record, frozen=True, kw_only=True):
    """`count` equal collectives in a row.

    Args:
        axis: of the mesh.
        operation: PyTorch's name.
        num_bytes: of the full array; of one rank's input for all_to_all and send_recv.
        backward: in which direction.
        beside: it may run beside the weight gradients' products.
    """

    axis: Axis
    operation: CollectiveName
    num_bytes: int
    count: int = 1
    backward: bool = False
    beside: bool = False


def layer_exchanges(
    model: Model, parallel: Parallel, training: Training, experts: Experts | None = None
) -> tuple[Exchange, ...]:
    """All of one layer and micro-batch, forward and backward; recomputation repeats those of forward."""
    share = Share.of(parallel, training)
    return (
        *(_tensor(model, parallel, share) if parallel.tp > 1 else ()),
        *(_context(model, parallel, training, share) if parallel.cp > 1 else ()),
        *(_experts(model, experts, share) if experts is not None and parallel.ep > 1 else ()),
    )


def _tensor(model: Model, parallel: Parallel, share: Share) -> tuple[Exchange, ...]:
    whole, beside = share.tokens * model.hidden * share.element_bytes, parallel.overlap_tp
    if not parallel.sequence:
        return (
            Exchange(axis="tp", operation="all_reduce", num_bytes=whole, count=2),
            Exchange(axis="tp", operation="all_reduce", num_bytes=whole, count=2, backward=True, beside=beside),
        )
    return (
        Exchange(axis="tp", operation="all_gather", num_bytes=whole, count=2),
        Exchange(axis="tp", operation="reduce_scatter", num_bytes=whole, count=2),
        Exchange(axis="tp", operation="all_gather", num_bytes=whole, count=4, backward=True),
        Exchange(axis="tp", operation="reduce_scatter", num_bytes=whole, count=2, backward=True, beside=beside),
    )


def _context(model: Model, parallel: Parallel, training: Training, share: Share) -> tuple[Exchange, ...]:
    width = 2 * max(model.key_heads // parallel.tp, 1) * model.head_width
    whole = share.batch * training.sequence * width * share.element_bytes
    return (
        Exchange(axis="cp", operation="all_gather", num_bytes=whole),
        Exchange(axis="cp", operation="all_gather", num_bytes=whole, backward=True),
        Exchange(axis="cp", operation="reduce_scatter", num_bytes=whole, backward=True),
    )


def _experts(model: Model, experts: Experts, share: Share) -> tuple[Exchange, ...]:
    """The busiest rank receives `imbalance` times the mean, and all wait for it."""
    sent = share.tokens_between * experts.per_token * model.hidden * share.element_bytes
    num_bytes = round(sent * experts.imbalance)
    return (
        Exchange(axis="ep", operation="all_to_all", num_bytes=num_bytes, count=2),
        Exchange(axis="ep", operation="all_to_all", num_bytes=num_bytes, count=2, backward=True),
    )


def send(model: Model, parallel: Parallel, training: Training) -> tuple[Exchange, ...]:
    """From one stage to the next, one micro-batch, one direction."""
    share = Share.of(parallel, training)
    whole = share.tokens * model.hidden * share.element_bytes
    part = Exchange(axis="pp", operation="send_recv", num_bytes=-(-whole // parallel.tp))
    if parallel.tp == 1 or parallel.sequence:
        return (part,)
    return part, Exchange(axis="tp", operation="all_gather", num_bytes=whole)
