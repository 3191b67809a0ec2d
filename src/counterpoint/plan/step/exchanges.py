"""List the collectives of a layer and between stages for one micro-batch: operations and bytes, without times.

A = micro_batch · sequence / cp · hidden · bytes of an element; blocks are attention and feed-forward, two per layer.

    axis          forward, per block             backward, per block                                   source
    tp            all_reduce A                   all_reduce A, during dW                               arXiv 1909.08053
    tp, sequence  all_gather A, reduce_scatter A all_gather A twice, reduce_scatter A during dW         arXiv 2205.05198
                  (into latent attention: of the latents instead of A)                                 arXiv 2405.04434
    cp            all_gather of keys and values  all_gather, reduce_scatter                            arXiv 2407.21783
    ep            all_to_all of the tokens' activations, there and back, both ways                     arXiv 2006.16668
    ep, by node   as ep, but each token once to each node that has an expert of it                     DeepEP
    ep, gather    all_gather A, ids, weights;    all_gather A; reduce_scatter A and the gradients      Megatron-LM's
                  reduce_scatter A               of weights                                            `allgather`
    pp            send_recv of A / tp per stage; without sequence parallelism gathered again over tp   arXiv 2104.04473

Backward, the gradient of a block's input is on its way while dW is made (`Parallel.overlap_tp`). The second all_gather
is of that input, which is kept sharded: dW needs it, so it does not run during dW and counts as exposed. Keys and
values of cp are gathered before attention starts: exposed, as Llama 3 does it.

In fp8 the all_gathers of dense layers are of one byte, as Transformer Engine and torchao have them; with scales of
rows, which differ by direction, of two.

With `Parallel.expert_tp` = 1 every rank of tp sends its own tokens to whole experts: their block needs nothing of tp,
unless there are shared experts, which tp cuts.

Gathered tokens are as many whatever the router chose: A of all ranks of ep, against A · per_token · imbalance where
tokens are sent. By node, a token goes over the NIC once for each node that has an expert of it, of n nodes on average
n (1 - (1 - 1/n)^per_token), at most `expert_nodes`, and at the same time over NVLink once to each rank with one. Slabs
hold `capacity_factor` times the mean; tokens beyond that go in further rounds, so the busiest rank decides on the
number of rounds. With `Parallel.overlap_ep` = "halves" each exchange runs twice, with half of the tokens.

With `Parallel.pieces_tp` collectives right before or after a matmul run beside that matmul, in pieces, and the input
is gathered again during the matmul of its gradient. Matmuls of experts are not cut.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

from msgspec.structs import replace

from counterpoint.plan.compute.layers import LocalShape
from counterpoint.plan.job.model import Experts, LatentAttention, Model
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.estimate import MeshTimes
from counterpoint.plan.network.group import Axis
from counterpoint.plan.network.network import Operation
from counterpoint.records import Record

WEIGHT_BYTES = 4  # of a router's weight
CHOICE_BYTES = WEIGHT_BYTES + 4  # with the number of its expert


class Exchange(Record, frozen=True, kw_only=True):
    """Describes `count` equal collectives that run one after the other."""

    axis: Axis  # of the mesh
    operation: Operation  # PyTorch's name
    num_bytes: int  # of the full array; of one rank's input for all_to_all and send_recv
    count: int = 1  # number of collectives
    ffn: int = 0  # how many of them belong to the feed-forward block
    backward: bool = False  # they belong to backward
    during_dw: bool = False  # they run during the products for the weights' gradients
    product: tuple[int, int] | None = None  # n and k of the product that they run beside, in pieces
    # what they overlap: of two halves, one overlaps the experts; or all overlap another micro-batch
    beside: Literal["", "experts", "micro_batch"] = ""
    per_token: int = 0  # by node: experts of a token; 0: every choice is sent by itself
    most_nodes: int | None = None  # by node: most nodes with experts of a token

    def us(self, times: MeshTimes) -> float:
        """Return the µs of all `count` collectives."""
        if self.per_token == 0:
            return self.count * times.find(self.axis, self.operation, self.num_bytes).us
        nodes, ranks = times.reached(self.axis)
        chosen, copy = min(nodes, self.most_nodes or nodes), self.num_bytes / self.per_token
        alone_us = times.find_in_node(self.axis, self.operation, copy * _distinct(chosen * ranks, self.per_token))
        if nodes > 1:
            once = round(copy * _distinct(chosen, self.per_token))
            alone_us = max(alone_us, times.find(self.axis, self.operation, once).us)
        return self.count * alone_us


def _distinct(count: int, draws: int) -> float:
    """Return the expected number of distinct places in `draws` draws from `count` places."""
    return count * (1.0 - (1.0 - 1.0 / count) ** draws)


def layer_exchanges(
    model: Model, parallel: Parallel, training: Training, experts: Experts | None = None
) -> tuple[Exchange, ...]:
    """Return one layer's exchanges for one micro-batch, not counting repetitions in recomputation.

    `experts`: the experts of the layer; None: a dense layer.
    """
    local = LocalShape.of(parallel, training)
    return (
        *(_in_fp8(_tensor(model, parallel, local, experts), local, experts) if parallel.tp > 1 else ()),
        *(_context(model, parallel, training, local) if parallel.cp > 1 else ()),
        *(_experts(model, parallel, experts, local) if experts is not None and parallel.ep > 1 else ()),
    )


def _in_fp8(exchanges: tuple[Exchange, ...], local: LocalShape, experts: Experts | None) -> tuple[Exchange, ...]:
    """Return the exchanges, with one byte per element in all_gathers of arrays that fp8 matmuls read.

    Ranks cast to fp8 before they gather. Sums, and what a router reads, are in bf16.
    """
    if local.fp8 in ("", "rowwise") or experts is not None:
        return exchanges
    return tuple(
        replace(each, num_bytes=each.num_bytes // local.element_bytes) if each.operation == "all_gather" else each
        for each in exchanges
    )


def _tensor(model: Model, parallel: Parallel, local: LocalShape, experts: Experts | None) -> tuple[Exchange, ...]:
    whole, during_dw = local.tokens * model.hidden * local.element_bytes, parallel.overlap_tp
    blocks = 1 if local.experts_whole and experts is not None and not experts.shared else 2  # that exchange over tp
    if parallel.pieces_tp:
        return _tensor_in_pieces(model, local, whole, experts)[: 5 * blocks]
    if parallel.sequence and model.mla is not None:
        return _tensor_of_latents(model, model.mla, local, whole, during_dw=during_dw)[: 5 * blocks]
    if not parallel.sequence:
        return (
            Exchange(axis="tp", operation="all_reduce", num_bytes=whole, count=2, ffn=1),
            Exchange(axis="tp", operation="all_reduce", num_bytes=whole, count=2, backward=True, during_dw=during_dw),
        )
    return (
        Exchange(axis="tp", operation="all_gather", num_bytes=whole, count=blocks, ffn=blocks - 1),
        Exchange(axis="tp", operation="reduce_scatter", num_bytes=whole, count=blocks, ffn=blocks - 1),
        Exchange(axis="tp", operation="all_gather", num_bytes=whole, count=2 * blocks, backward=True),
        Exchange(
            axis="tp", operation="reduce_scatter", num_bytes=whole, count=blocks, backward=True, during_dw=during_dw
        ),
    )


def _tensor_of_latents(
    model: Model, mla: LatentAttention, local: LocalShape, whole: int, *, during_dw: bool
) -> tuple[Exchange, ...]:
    """Return the tp exchanges of a layer with latent attention, which gathers latents instead of its input."""
    width = mla.latent_width if mla.q_lora_rank is not None else mla.latent_width + model.hidden
    found: list[Exchange] = []
    for ffn, entering in enumerate((local.tokens * width * local.element_bytes, whole)):
        found += [
            Exchange(axis="tp", operation="all_gather", num_bytes=entering, ffn=ffn),
            Exchange(axis="tp", operation="reduce_scatter", num_bytes=whole, ffn=ffn),
            Exchange(axis="tp", operation="all_gather", num_bytes=whole, backward=True),
            Exchange(axis="tp", operation="all_gather", num_bytes=entering, backward=True),
            Exchange(axis="tp", operation="reduce_scatter", num_bytes=entering, backward=True, during_dw=during_dw),
        ]
    return tuple(found)


def _tensor_in_pieces(model: Model, local: LocalShape, whole: int, experts: Experts | None) -> tuple[Exchange, ...]:
    """Return a layer's tp exchanges, cut in pieces that overlap the first and the last matmul of each block."""
    queries = model.heads * model.head_width // local.tp
    keys = max(model.key_heads // local.tp, 1) * model.head_width
    width = model.ffn_width // local.tp
    values = max(model.key_heads // local.tp, 1) * model.value_width
    out = model.heads * model.value_width // local.tp
    attention, feed_forward = (queries + keys + values, out), ((2 if model.gated else 1) * width, width)
    found: list[Exchange] = []
    for ffn, ((columns, depth), is_cut) in enumerate(((attention, True), (feed_forward, experts is None))):
        first, last, gradient = (columns, model.hidden), (model.hidden, depth), (depth, model.hidden)
        kinds: tuple[tuple[Operation, tuple[int, int] | None, bool, bool], ...] = (
            ("all_gather", first, False, False),
            ("reduce_scatter", last, False, False),
            ("all_gather", gradient, True, False),
            ("all_gather", None, True, is_cut),
            ("reduce_scatter", None, True, True),
        )
        for operation, product, backward, during_dw in kinds:
            found.append(
                Exchange(
                    axis="tp", operation=operation, num_bytes=whole, backward=backward, during_dw=during_dw,
                    product=product if is_cut else None, ffn=ffn,
                )
            )  # fmt: skip
    return tuple(found)


def _context(model: Model, parallel: Parallel, training: Training, local: LocalShape) -> tuple[Exchange, ...]:
    width = max(model.key_heads // parallel.tp, 1) * (model.head_width + model.value_width)
    whole = local.batch * training.sequence * width * local.element_bytes
    return (
        Exchange(axis="cp", operation="all_gather", num_bytes=whole),
        Exchange(axis="cp", operation="all_gather", num_bytes=whole, backward=True),
        Exchange(axis="cp", operation="reduce_scatter", num_bytes=whole, backward=True),
    )


def _experts(model: Model, parallel: Parallel, experts: Experts, local: LocalShape) -> tuple[Exchange, ...]:
    if parallel.expert_exchange == "gather":
        found = _gathered_tokens(model, parallel, experts, local)
    else:
        found = _sent_tokens(model, parallel, experts, local)
    if not parallel.overlap_ep:
        return found
    if parallel.overlap_ep == "micro_batches":
        return tuple(replace(each, beside="micro_batch") for each in found)
    return tuple(
        replace(each, num_bytes=-(-each.num_bytes // 2), count=2 * each.count, ffn=2 * each.ffn, beside="experts")
        for each in found
    )


def _sent_tokens(model: Model, parallel: Parallel, experts: Experts, local: LocalShape) -> tuple[Exchange, ...]:
    """Return the all_to_alls of tokens; all ranks wait for the busiest, which receives `imbalance` times the mean."""
    sent, rounds = local.tokens_between * experts.per_token * model.hidden * local.element_bytes, 1
    num_bytes = round(sent * experts.imbalance)
    if parallel.expert_exchange == "slabs":
        num_bytes, rounds = round(sent * parallel.capacity_factor), ceil(experts.imbalance / parallel.capacity_factor)
    both, per_token = 2 * rounds, experts.per_token if parallel.expert_exchange == "by_node" else 0
    forward = Exchange(
        axis="ep", operation="all_to_all", num_bytes=num_bytes, count=both, ffn=both,
        per_token=per_token, most_nodes=parallel.expert_nodes,
    )  # fmt: skip
    return forward, replace(forward, ffn=0, backward=True)


def _gathered_tokens(model: Model, parallel: Parallel, experts: Experts, local: LocalShape) -> tuple[Exchange, ...]:
    """Return the exchanges by which every rank gathers all tokens and reduce_scatters the experts' outputs."""
    tokens = parallel.ep * local.tokens_between
    whole, choices = tokens * model.hidden * local.element_bytes, tokens * experts.per_token
    return (
        Exchange(axis="ep", operation="all_gather", num_bytes=choices * CHOICE_BYTES, ffn=1),
        Exchange(axis="ep", operation="all_gather", num_bytes=whole, ffn=1),
        Exchange(axis="ep", operation="reduce_scatter", num_bytes=whole, ffn=1),
        Exchange(axis="ep", operation="all_gather", num_bytes=whole, backward=True),
        Exchange(axis="ep", operation="reduce_scatter", num_bytes=choices * WEIGHT_BYTES, backward=True),
        Exchange(axis="ep", operation="reduce_scatter", num_bytes=whole, backward=True),
    )


def stage_exchanges(model: Model, parallel: Parallel, training: Training) -> tuple[Exchange, ...]:
    """Return the exchanges by which one stage sends one micro-batch to the next stage, in one direction."""
    local = LocalShape.of(parallel, training)
    whole = local.tokens * model.hidden * local.element_bytes
    part = Exchange(axis="pp", operation="send_recv", num_bytes=-(-whole // parallel.tp))
    if parallel.tp == 1 or parallel.sequence:
        return (part,)
    return part, Exchange(axis="tp", operation="all_gather", num_bytes=whole)
