"""List the operations that one rank runs for one micro-batch: their shapes and bytes, not their times.

    tokens t = micro_batch · sequence / cp            h hidden, f width of the feed-forward block, d width of a head
    matmul  y[t, n] = x[t, k] W[k, n]                 forward  t × n × k
            dx = dy Wᵀ, dW = xᵀ dy                    backward t × k × n and k × n × t
    tp cuts n of the first and k of the second matmul of each block (arXiv 1909.08053); what lies between the blocks is
    whole on every rank, or 1/tp of the tokens with sequence parallelism (arXiv 2205.05198)
    latent attention: products into the latents are not cut; with sequence parallelism each rank makes those of its
    tokens (Megatron-LM, multi_latent_attention.py)

The bytes of a memory-bound operation are summed over the kernels that run: `fused` as Megatron-LM has them (arXiv
2104.04473, section 4.2: bias + GeLU, bias + dropout + add, scale + mask + softmax), `eager` one kernel per operator, as
in the profile of a Llama-3-8B layer on H200 (`samples/fsdp-healthy`). Without flash attention the scores go to memory:
softmax and dropout over [micro_batch, heads / tp, sequence, sequence].

In an fp8 job the linear layers of the blocks run in fp8, attention only if asked for, and router, embedding and logits
never. Each linear layer casts its input, its weight (once a step, with zero 3 after each all_gather) and the gradient
of its output, each in two layouts, since fp8 matmuls want both operands contiguous along k.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from counterpoint.plan.compute.operations import FlashAttentionOp, MatmulOp, MemoryBoundOp, Operation
from counterpoint.plan.job.model import Experts, LatentAttention, Model
from counterpoint.plan.job.parallel import ExpertExchange, Parallel, RecomputeModule, Training
from counterpoint.records import Record

LOGIT_BYTES = 36  # bytes moved for one logit, from the product to its gradient, partly in float32
ROUTER_PASSES = 12  # over the float32 scores of all experts: softmax, choice, balance, counts, places
FUSED_NORM = (4, 1), (10, 2)  # forward and backward: bytes of an element in bf16, kernels
# the same for an RMSNorm of tensor operators: 26 and 52 bytes, over the 0.58 of streaming bandwidth that they reach
EAGER_NORM = (45, 7), (90, 14)
ROTARY_BYTES = {"fused": 4, "eager": 20}  # per element of q and k; fused: read and write; eager: cos, -x, cat, sin, add


class Cast(Record, frozen=True, kw_only=True):
    """Describes the cast of a matmul's operand to fp8, which writes the operand and its transpose."""

    num_bytes: float  # of an element: maximum, value and its transpose, scales
    kernels: int = 1
    joins_norm: bool = True  # a norm writes its output already cast, with no more bytes than in bf16


CASTS = {
    "delayed": Cast(num_bytes=4.0),  # scale of earlier steps: Transformer Engine's cast_transpose
    # maximum, scale, cast: Transformer Engine's current scaling, torchao's dynamic one
    "tensorwise": Cast(num_bytes=6.0, kernels=3, joins_norm=False),
    # torchao: maximum and cast along rows and columns by themselves
    "rowwise": Cast(num_bytes=10.0, kernels=4, joins_norm=False),
    "blockwise": Cast(num_bytes=4.0 + 2 * 4 / 128, joins_norm=False),  # a float32 scale for 128 elements of a row
    "mxfp8": Cast(num_bytes=4.0 + 2 / 32),  # a byte for 32 elements
}


class LayerWork(Record, frozen=True, kw_only=True):
    """Holds the operations of a layer, embedding or head; the fields `core` to `experts` hold subsets of `forward`."""

    forward: tuple[Operation, ...] = ()
    core: tuple[Operation, ...] = ()  # of attention: scores, softmax, values
    norms: tuple[Operation, ...] = ()
    activation: tuple[Operation, ...] = ()  # of the feed-forward block
    ffn: tuple[Operation, ...] = ()  # the feed-forward block, with `activation`
    experts: LayerWork | None = None  # the feed-forward block without dispatch and combine of tokens
    backward: tuple[Operation, ...] = ()

    def recomputed(self, modules: Collection[RecomputeModule], *, routed: bool) -> tuple[Operation, ...]:
        """Return the forward operations of `modules` that backward recomputes; `routed`: the layer has experts."""
        found = self.core if "core_attn" in modules else ()
        if "layernorm" in modules:
            found += self.norms
        if ("moe" if routed else "mlp") in modules:
            found += self.ffn
        elif routed and "moe_act" in modules:
            found += self.activation
        return found


class LocalShape(Record, frozen=True, kw_only=True):
    """Describes one rank's share of a micro-batch: tokens, and how many ranks shard matrices and experts."""

    batch: int  # samples
    queries: int  # tokens of a sample on this rank
    keys: int  # tokens that they attend to
    tp: int = 1  # ranks that share the matrices
    ep: int = 1  # ranks that share the experts of a layer
    experts_whole: bool = False  # tp does not cut them: each of its ranks sends its own tokens to experts
    exchange: ExpertExchange = "all_to_all"  # how tokens get to experts of other ranks
    halves: int = 1  # number of equal parts in which tokens visit their experts
    sequence: bool = True  # activations between the matrices are divided, too
    flash: bool = True  # flash attention
    flash_version: int = 3
    fused: bool = True  # kernels of Megatron-LM instead of eager ones
    fused_norms: bool = True  # one kernel for a norm
    element_bytes: int = 2  # of an activation
    fp8: str = ""  # how the operands of linear layers are scaled; "": they are not in fp8
    fp8_attention: bool = False
    weight_casts: float = 0.0  # to fp8, by a micro-batch: once a step below zero 3, else once or, fp8 gathered, never

    @classmethod
    def of(cls, parallel: Parallel, training: Training) -> LocalShape:
        """Return a micro-batch's shape and sharding on one rank of a job, equal on all ranks."""
        return cls(
            batch=training.micro_batch,
            queries=training.sequence // parallel.cp,
            keys=training.sequence,
            tp=parallel.tp,
            ep=parallel.ep,
            experts_whole=parallel.experts_cut < parallel.tp,
            exchange=parallel.expert_exchange if parallel.ep > 1 else "all_to_all",
            halves=2 if parallel.ep > 1 and parallel.overlap_ep in (True, "halves") else 1,
            sequence=parallel.sequence,
            flash=training.flash_attention,
            flash_version=training.flash_version,
            fused=training.fused_kernels,
            fused_norms=training.fused_norms,
            element_bytes=training.element_bytes,
            fp8=training.fp8_scaling if training.precision == "fp8" else "",
            fp8_attention=training.precision == "fp8" and training.fp8_attention,
            weight_casts=1 / training.micro_batches(parallel) if parallel.zero < 3 else float(not training.fp8_gather),
        )

    @property
    def tokens(self) -> int:
        """Return the number of tokens that attention and matmuls process on this rank."""
        return self.batch * self.queries

    def expert_rows(self, experts: Experts) -> float:
        """Return token rows in the experts' buffers / mean rows: `imbalance`, or `ep` for buffers of fixed size.

        Buffers have a fixed size where no host waits for the number of rows: all ranks may choose this rank's experts.
        """
        return experts.imbalance if self.exchange in ("all_to_all", "by_node") else float(self.ep)

    @property
    def tokens_between(self) -> int:
        """Return the number of tokens that norms, dropouts and residual additions process on this rank."""
        return self.tokens // self.tp if self.sequence else self.tokens


def layer_work(model: Model, local: LocalShape, experts: Experts | None = None) -> LayerWork:
    """Return the operations of one transformer block; with `experts` its feed-forward part is a mixture of experts."""
    core = _flash(model, local) if local.flash else _scores(model, local)
    before = _projections(model, local) if model.mla is None else _latents(model, model.mla, local)
    width = model.heads * model.value_width // local.tp
    attention = _join(*before, core, _linear("attention out", local, n=model.hidden, k=width))
    between = _between(model, local)
    ffn = _dense(model, local) if experts is None else _routed(model, experts, local)
    return LayerWork(
        forward=attention.forward + ffn.forward + between.forward, core=attention.core, norms=between.norms,
        activation=ffn.activation, ffn=ffn.forward, experts=ffn.experts,
        backward=attention.backward + ffn.backward + between.backward,
    )  # fmt: skip


def _linear(
    name: str,
    local: LocalShape,
    *,
    n: int,
    k: int,
    m: int | None = None,
    batch: int = 1,
    fp8: bool = True,
    normed: bool = False,
) -> LayerWork:
    """Return the operations of a linear layer: `batch` products [m, k] x [k, n] forward, twice as many backward.

    Without `m`, the input is all tokens of the rank. `normed`: a norm writes the input; `fp8`: the layer runs in fp8 if
    the job does.
    """
    rows, size = local.tokens if m is None else m, local.element_bytes
    fp8 = fp8 and bool(local.fp8)

    def product(part: str, m: int, n: int, k: int, weight: bool = False) -> MatmulOp:
        return MatmulOp(
            name=f"{name}{part}", m=m, n=n, k=k, batch=batch, element_bytes=size, weight_gradient=weight, fp8=fp8,
            grouped=batch > 1,
        )  # fmt: skip

    def cast(elements: float, *, of_norm: bool = False) -> tuple[MemoryBoundOp, ...]:
        if not fp8 or not elements or (of_norm and CASTS[local.fp8].joins_norm):
            return ()
        return _traffic("cast to fp8", CASTS[local.fp8].num_bytes * batch * elements, CASTS[local.fp8].kernels)

    weight = cast(local.weight_casts * n * k)
    return LayerWork(
        forward=(*cast(rows * k, of_norm=normed and local.fused), *weight, product("", rows, n, k)),
        backward=(*cast(rows * n), product(" dx", rows, k, n), product(" dW", k, n, rows, weight=True)),
    )


def _join(*works: LayerWork) -> LayerWork:
    return LayerWork(
        forward=tuple(op for work in works for op in work.forward),
        core=tuple(op for work in works for op in work.core),
        activation=tuple(op for work in works for op in work.activation),
        backward=tuple(op for work in works for op in work.backward),
    )


def _projections(model: Model, local: LocalShape) -> list[LayerWork]:
    """Return the operations that make queries, keys and values: matmuls, QK norms, rotary embeddings."""
    width, shared = model.head_width, max(model.key_heads // local.tp, 1)
    queries, keys, values = model.heads * width // local.tp, shared * width, shared * model.value_width
    if local.fused:
        qkv = _linear("qkv", local, n=queries + keys + values, k=model.hidden, normed=True)
    else:
        each = (("q", queries), ("k", keys), ("v", values))
        products = (_linear(name, local, n=columns, k=model.hidden) for name, columns in each)
        qkv = _join(*products, _summed(model, local, 3))
    works = [qkv]
    if model.qk_norm:
        works.append(_norms("qk norm", local, float(local.tokens) * (queries + keys), count=2))
    if model.rotates:
        num_bytes = ROTARY_BYTES["fused" if local.fused else "eager"] * local.tokens * (queries + keys)
        works.append(_rotary(local, num_bytes))
    return works


def _latents(model: Model, mla: LatentAttention, local: LocalShape) -> list[LayerWork]:
    """Return the operations before latent attention's scores: down and up projections, norms, rotary embeddings."""
    heads, tokens, rope = model.heads // local.tp, float(local.tokens), mla.qk_rope_head_dim
    down = [_linear("kv down", local, n=mla.kv_lora_rank + rope, k=model.hidden, m=local.tokens_between)]
    if mla.q_lora_rank is not None:
        down.append(_linear("q down", local, n=mla.q_lora_rank, k=model.hidden, m=local.tokens_between))
    normed = mla.latent_width - rope
    up = mla.qk_nope_head_dim + mla.v_head_dim
    whole = 2.0 * local.element_bytes * tokens * heads * model.head_width  # queries or keys, in and out
    if local.fused:  # one kernel rotates a part of the queries, another splits the product into keys and values
        moved = local.element_bytes * tokens * (heads * (2 * rope + 2 * up + rope) + rope)
    else:
        moved = ROTARY_BYTES["eager"] * tokens * (heads + 1) * rope + 2 * whole
    return [
        *down,
        _norms("latent norms", local, float(local.tokens_between) * normed, count=len(down)),
        _linear("q up" if len(down) > 1 else "q", local, n=heads * model.head_width, k=mla.q_lora_rank or model.hidden),
        _linear("kv up", local, n=heads * up, k=mla.kv_lora_rank),
        _rotary(local, moved),
    ]


def _rotary(local: LocalShape, num_bytes: float) -> LayerWork:
    rotary = MemoryBoundOp(
        name="rotary", num_bytes=num_bytes, kernels=2 if local.fused else 10, strided=not local.fused
    )  # fmt: skip
    return LayerWork(forward=(rotary,), backward=(rotary,))


def _norms(name: str, local: LocalShape, elements: float, *, count: int) -> LayerWork:
    """Return the operations of `count` norms over `elements` elements in total, forward and backward."""
    (each, kernels), (each_back, kernels_back) = FUSED_NORM if local.fused_norms else EAGER_NORM
    size = local.element_bytes / 2
    return LayerWork(
        forward=_traffic(name, each * size * elements, kernels * count),
        backward=_traffic(f"{name} backward", each_back * size * elements, kernels_back * count),
    )


def _flash(model: Model, local: LocalShape) -> LayerWork:
    def flash(backward: bool) -> FlashAttentionOp:
        return FlashAttentionOp(
            name="flash attention" + (" backward" if backward else ""),
            batch=local.batch * model.heads // local.tp, queries=local.queries, keys=local.keys,
            width=model.head_width, value_width=model.value_width, causal=model.causal, seen=model.seen(local.keys),
            backward=backward, element_bytes=local.element_bytes, fp8=local.fp8_attention, version=local.flash_version,
        )  # fmt: skip

    return LayerWork(forward=(flash(False),), core=(flash(False),), backward=(flash(True),))


def _scores(model: Model, local: LocalShape) -> LayerWork:
    """Return unfused attention's operations: scores go to memory, and a causal softmax reads only half of them."""
    batch, size = local.batch * model.heads // local.tp, local.element_bytes
    q, k, d, v = local.queries, local.keys, model.head_width, model.value_width
    elements = float(batch) * q * k

    def product(name: str, m: int, n: int, k: int) -> MatmulOp:
        return MatmulOp(name=name, m=m, n=n, k=k, batch=batch, element_bytes=size)

    seen = 0.5 if model.causal else 1.0
    softmax = MemoryBoundOp(name="softmax", num_bytes=size * elements * (1 + seen))
    back = MemoryBoundOp(name="softmax backward", num_bytes=size * elements * (1 + 2 * seen))
    dropout = _traffic("attention dropout", elements * (2 * size + 1)) if model.dropout else ()
    core: tuple[Operation, ...] = (
        product("scores", q, k, d),
        softmax,
        *dropout,
        product("values", q, v, k),
        MemoryBoundOp(name="heads together", num_bytes=2.0 * size * batch * q * v),
    )
    backward: tuple[Operation, ...] = (
        product("values dv", k, v, q),
        product("values dp", q, k, v),
        *dropout,
        back,
        product("scores dq", q, d, k),
        product("scores dk", k, d, q),
        MemoryBoundOp(name="heads apart", num_bytes=2.0 * size * batch * (q * d + k * (d + v))),
    )
    return LayerWork(forward=core, core=core, backward=backward)


def _traffic(name: str, num_bytes: float, kernels: int = 1) -> tuple[MemoryBoundOp, ...]:
    return (MemoryBoundOp(name=name, num_bytes=num_bytes, kernels=kernels),)


def _activation(model: Model, local: LocalShape, elements: float) -> LayerWork:
    """Return the kernels of SwiGLU or GeLU; eager SwiGLU has 2 forward (silu, mul) and 3 backward (silu, two muls)."""
    size = local.element_bytes
    if not model.gated:
        gelu = _traffic("gelu", 2 * size * elements)
        return LayerWork(forward=gelu, activation=gelu, backward=_traffic("gelu backward", 4 * size * elements))
    forward, backward = (3, 5) if local.fused else (5, 9)
    swiglu = _traffic("swiglu", forward * size * elements, 1 if local.fused else 2)
    return LayerWork(
        forward=swiglu,
        activation=swiglu,
        backward=_traffic("swiglu backward", backward * size * elements, 1 if local.fused else 3),
    )


def _dense(model: Model, local: LocalShape) -> LayerWork:
    width = model.ffn_width // local.tp
    return _join(
        *_first_matmuls(model, local, width),
        _activation(model, local, float(local.tokens) * width),
        _linear("ffn out", local, n=model.hidden, k=width),
    )


def _first_matmuls(
    model: Model, local: LocalShape, width: int, m: int | None = None, batch: int = 1
) -> list[LayerWork]:
    if not model.gated or local.fused:
        name, columns = ("gate and up", 2 * width) if model.gated else ("ffn in", width)
        return [_linear(name, local, n=columns, k=model.hidden, m=m, batch=batch, normed=m is None)]
    products = [_linear(name, local, n=width, k=model.hidden, m=m, batch=batch) for name in ("gate", "up")]
    return [*products, _summed(model, local, 2, rows=None if m is None else m * batch)]


def _summed(model: Model, local: LocalShape, products: int, rows: int | None = None) -> LayerWork:
    """Return the kernels that sum an input's gradients where several matmuls read that input."""
    elements, adds = float(local.tokens if rows is None else rows) * model.hidden, products - 1
    return LayerWork(backward=_traffic("input gradients", 3 * local.element_bytes * elements * adds, adds))


def _routed(model: Model, experts: Experts, local: LocalShape) -> LayerWork:
    """Return the operations of a MoE block: router, dispatch, combine, and this rank's experts as grouped matmuls.

    The busiest rank sets the pace: its experts see `imbalance` times the mean of tokens.
    """
    per_rank = max(experts.count // local.ep, 1)
    tokens, cut = (local.tokens_between, 1) if local.experts_whole else (local.tokens, local.tp)
    visits = tokens * experts.per_token
    rows = max(round(visits * experts.imbalance / per_rank / local.halves), 1)
    width = max(experts.width // cut, 1)
    sorts = 2 if local.ep > 1 and local.exchange != "gather" else 1  # of tokens: before they are sent, and by expert
    moved = there = sorts * 2.0 * local.element_bytes * visits * model.hidden
    if local.exchange == "gather":  # a sum for each token of every rank
        there = 1.0 * local.element_bytes * (visits + local.ep * tokens) * model.hidden
    kernels = 2 * sorts * local.halves
    scores = 4.0 * ROUTER_PASSES * tokens * experts.count
    part = replace(local, weight_casts=local.weight_casts / local.halves)
    products = local.halves * [
        *_first_matmuls(model, part, width, m=rows, batch=per_rank),
        _activation(model, part, float(rows) * per_rank * width),
        _linear("ffn out", part, n=model.hidden, k=width, m=rows, batch=per_rank),
    ]
    shared: list[LayerWork] = []
    if experts.shared:
        columns = max(experts.shared * experts.width // local.tp, 1)
        shared = [
            *_first_matmuls(model, local, columns),
            _activation(model, local, float(local.tokens) * columns),
            _linear("shared out", local, n=model.hidden, k=columns),
        ]
    whole = _join(
        _linear("router", local, n=experts.count, k=model.hidden, m=tokens, fp8=False),
        LayerWork(
            forward=_traffic("routing", scores, ROUTER_PASSES),
            backward=_traffic("routing backward", scores / 2, ROUTER_PASSES // 2),
        ),
        LayerWork(forward=_traffic("dispatch", moved, kernels), backward=_traffic("dispatch backward", there, kernels)),
        *products,
        LayerWork(forward=_traffic("combine", there, kernels), backward=_traffic("combine backward", moved, kernels)),
        *shared,
    )
    return replace(whole, experts=_join(*products, *shared))


def _between(model: Model, local: LocalShape) -> LayerWork:
    """Return the norms and the two residual additions of a block, with bias and dropout where the model has them."""
    elements, size = float(local.tokens_between) * model.hidden, local.element_bytes
    norms = _norms("norms", local, model.norms * elements, count=model.norms)
    mask = elements if model.dropout else 0.0
    add = 3 * size * elements + mask
    undo = 2 * size * elements + mask + 2 * size * elements if model.dropout else 0.0  # the mask, and the bias' sum
    return LayerWork(
        forward=(*norms.forward, *_traffic("residual add", 2 * add, 2)),
        norms=norms.forward,
        backward=(
            *norms.backward,
            *_traffic("residual add backward", 2 * (3 * size * elements + undo), 4 if model.dropout else 2),
        ),
    )


def embedding_work(model: Model, local: LocalShape) -> LayerWork:
    """Return the operations of the embedding, run by the first stage: row lookup forward, gradient sums backward."""
    elements = float(local.tokens_between) * model.hidden
    extra = (2 * local.element_bytes + 1) * elements if model.dropout else 0.0
    return LayerWork(
        forward=_traffic("embedding", 2 * local.element_bytes * elements + extra),
        backward=_traffic("embedding backward", 4 * local.element_bytes * elements + extra, 4),
    )


def head_work(model: Model, local: LocalShape) -> LayerWork:
    """Return the operations of the last norm, the logits and the loss, which the last stage runs."""
    rows = max(model.vocab // local.tp, 1)
    logits = float(local.tokens) * rows * LOGIT_BYTES
    elements = float(local.tokens_between) * model.hidden
    loss = LayerWork(forward=_traffic("loss", logits / 2, 4), backward=_traffic("loss backward", logits / 2, 3))
    norm = _norms("last norm", local, elements, count=1)
    return _join(norm, _linear("logits", local, n=rows, k=model.hidden, fp8=False), loss)


def mtp_work(model: Model, local: LocalShape) -> LayerWork:
    """Return the operations that a multi-token prediction module has besides its layer (arXiv 2412.19437, section 2.2).

    The last layer's output and the embedding of the next token, both normalised, are projected together; each rank
    projects its own tokens. The model's embedding and head run once more.
    """
    elements = float(local.tokens_between) * model.hidden
    return _join(
        embedding_work(model, local),
        _norms("norms of both inputs", local, 2 * elements, count=2),
        LayerWork(
            forward=_traffic("inputs together", 4 * local.element_bytes * elements),
            backward=_traffic("inputs apart", 4 * local.element_bytes * elements),
        ),
        _linear("projection", local, n=model.hidden, k=2 * model.hidden, m=local.tokens_between),
        head_work(model, local),
    )
