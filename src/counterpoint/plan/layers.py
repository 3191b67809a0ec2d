"""The operations that one rank runs for one micro-batch, as data: shapes and bytes, no times.

    tokens t = micro_batch · sequence / cp            h hidden, f width of the feed-forward block, d width of a head
    matmul  y[t, n] = x[t, k] W[k, n]                 forward  t × n × k
            dx = dy Wᵀ, dW = xᵀ dy                    backward t × k × n and k × n × t
    tp cuts n of the first and k of the second matmul of each block (arXiv 1909.08053); what lies between the blocks is
    whole on every rank, or 1/tp of the tokens with sequence parallelism (arXiv 2205.05198)

Bytes of the memory-bound operations are those of the kernels that run: `fused` as Megatron-LM has them (arXiv
2104.04473, section 4.2: bias + GeLU, bias + dropout + add, scale + mask + softmax), `eager` one kernel per operator, as
in the profile of a Llama-3-8B layer on H200 (`samples/fsdp-healthy`). Without flash attention the scores go to memory:
softmax and dropout over [micro_batch, heads / tp, sequence, sequence].
"""

from __future__ import annotations

from typing import TypeAlias

from counterpoint.plan.model import Experts, Model
from counterpoint.plan.parallel import Parallel, Training
from counterpoint.records.base import Record

__all__ = ["Flash", "Matmul", "Operation", "Share", "Traffic", "Work", "embedding", "expert_layers", "head", "layer"]

LOGIT_BYTES = {"fused": 52, "eager": 36}  # of one logit from the product to its gradient, in float32 on the way
ROTARY_BYTES = {"fused": 4, "eager": 20}  # per element of q and k: in and out; cos, -x, cat, sin and add on their own


class Matmul(Record, frozen=True, kw_only=True):
    """`batch` products [m, k] x [k, n]."""

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    element_bytes: int = 2
    weight_gradient: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def num_bytes(self) -> float:
        return float(self.element_bytes * self.batch) * (self.m * self.k + self.k * self.n + self.m * self.n)


class Flash(Record, frozen=True, kw_only=True):
    """Attention whose scores stay on chip: 2 matmuls forward, 5 backward (arXiv 2307.08691)."""

    name: str
    batch: int  # samples · heads
    queries: int
    keys: int
    width: int
    causal: bool
    backward: bool = False
    element_bytes: int = 2

    @property
    def flops(self) -> float:
        products = 5 if self.backward else 2
        seen = 0.5 if self.causal else 1.0
        return 2.0 * products * self.batch * self.queries * self.keys * self.width * seen

    @property
    def num_bytes(self) -> float:
        passes = 2.0 if self.backward else 1.0
        return passes * 2.0 * self.element_bytes * self.batch * self.width * (self.queries + self.keys)


class Traffic(Record, frozen=True, kw_only=True):
    """A memory-bound operation: what it reads and writes in all its kernels."""

    name: str
    num_bytes: float
    kernels: int = 1
    strided: bool = False  # one side is a transposed view


Operation: TypeAlias = Matmul | Flash | Traffic


class Work(Record, frozen=True, kw_only=True):
    """Of one layer, embedding or head. `core`: what selective recomputation runs again; it is part of `forward`."""

    forward: tuple[Operation, ...] = ()
    core: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()


class Share(Record, frozen=True, kw_only=True):
    """What of a micro-batch one rank works on.

    Args:
        batch: samples.
        queries: tokens of a sample here.
        keys: tokens that they look at.
        tp: ranks that share the matrices.
        sequence: what lies between the matrices is shared, too.
        flash: flash attention.
        fused: kernels of Megatron-LM instead of eager ones.
        element_bytes: of an activation.
    """

    batch: int
    queries: int
    keys: int
    tp: int = 1
    ep: int = 1
    sequence: bool = True
    flash: bool = True
    fused: bool = True
    element_bytes: int = 2

    @classmethod
    def of(cls, parallel: Parallel, training: Training) -> Share:
        return cls(
            batch=training.micro_batch,
            queries=training.sequence // parallel.cp,
            keys=training.sequence,
            tp=parallel.tp,
            ep=parallel.ep,
            sequence=parallel.sequence,
            flash=training.flash_attention,
            fused=training.fused_kernels,
            element_bytes=4 if training.precision == "fp32" else 2,
        )

    @property
    def tokens(self) -> int:
        return self.batch * self.queries

    @property
    def tokens_between(self) -> int:
        """That norms, dropouts and additions see."""
        return self.tokens // self.tp if self.sequence else self.tokens


def layer(model: Model, share: Share, experts: Experts | None = None) -> Work:
    """One transformer block; with `experts` its feed-forward part is theirs."""
    attention, between = _attention(model, share), _between(model, share)
    ffn = _dense(model, share) if experts is None else _routed(model, experts, share)
    return Work(
        forward=attention.forward + ffn.forward + between.forward,
        core=attention.core,
        backward=attention.backward + ffn.backward + between.backward,
    )


def expert_layers(model: Model) -> int:
    """How many of the model's layers have experts."""
    return 0 if model.experts is None else model.layers // model.experts.every


def _linear(name: str, share: Share, *, n: int, k: int, m: int | None = None, batch: int = 1) -> Work:
    rows, size = share.tokens if m is None else m, share.element_bytes

    def product(part: str, m: int, n: int, k: int, weight: bool = False) -> Matmul:
        return Matmul(
            name=f"{name}{part}", m=m, n=n, k=k, batch=batch, element_bytes=size, weight_gradient=weight
        )  # fmt: skip

    return Work(
        forward=(product("", rows, n, k),),
        backward=(product(" dx", rows, k, n), product(" dW", k, n, rows, weight=True)),
    )


def _join(*works: Work) -> Work:
    return Work(
        forward=tuple(op for work in works for op in work.forward),
        core=tuple(op for work in works for op in work.core),
        backward=tuple(op for work in works for op in work.backward),
    )


def _attention(model: Model, share: Share) -> Work:
    width, tp = model.head_width, share.tp
    queries, keys = model.heads * width // tp, max(model.key_heads // tp, 1) * width
    if share.fused:
        qkv = _linear("qkv", share, n=queries + 2 * keys, k=model.hidden)
    else:
        qkv = _join(*(_linear(n, share, n=w, k=model.hidden) for n, w in (("q", queries), ("k", keys), ("v", keys))))
    works = [qkv, _flash(model, share) if share.flash else _scores(model, share)]
    if model.gated:  # Llama and what followed it turn their queries and keys; GPT-3 has learned positions
        each = ROTARY_BYTES["fused" if share.fused else "eager"] * share.tokens * (queries + keys)
        rotary = Traffic(name="rotary", num_bytes=each, kernels=2 if share.fused else 10, strided=not share.fused)
        works.append(Work(forward=(rotary,), backward=(rotary,)))
    return _join(*works, _linear("attention out", share, n=model.hidden, k=queries))


def _flash(model: Model, share: Share) -> Work:
    def flash(backward: bool) -> Flash:
        return Flash(
            name="flash attention" + (" backward" if backward else ""),
            batch=share.batch * model.heads // share.tp, queries=share.queries, keys=share.keys,
            width=model.head_width, causal=model.causal, backward=backward, element_bytes=share.element_bytes,
        )  # fmt: skip

    return Work(forward=(flash(False),), core=(flash(False),), backward=(flash(True),))


def _scores(model: Model, share: Share) -> Work:
    """Attention with its scores in memory; the causal softmax reads only the half that it needs."""
    batch, size = share.batch * model.heads // share.tp, share.element_bytes
    q, k, d = share.queries, share.keys, model.head_width
    elements = float(batch) * q * k

    def product(name: str, m: int, n: int, k: int) -> Matmul:
        return Matmul(name=name, m=m, n=n, k=k, batch=batch, element_bytes=size)

    seen = 0.5 if model.causal else 1.0
    softmax = Traffic(name="softmax", num_bytes=size * elements * (1 + seen))
    back = Traffic(name="softmax backward", num_bytes=size * elements * (1 + 2 * seen))
    dropout = _traffic("attention dropout", elements * (2 * size + 1)) if model.dropout else ()
    core: tuple[Operation, ...] = (
        product("scores", q, k, d),
        softmax,
        *dropout,
        product("values", q, d, k),
        Traffic(name="heads together", num_bytes=2.0 * size * batch * q * d),
    )
    backward: tuple[Operation, ...] = (
        product("values dv", k, d, q),
        product("values dp", q, k, d),
        *dropout,
        back,
        product("scores dq", q, d, k),
        product("scores dk", k, d, q),
        Traffic(name="heads apart", num_bytes=2.0 * size * batch * (q + 2 * k) * d),
    )
    return Work(forward=core, core=core, backward=backward)


def _traffic(name: str, num_bytes: float, kernels: int = 1) -> tuple[Traffic, ...]:
    return (Traffic(name=name, num_bytes=num_bytes, kernels=kernels),)


def _activation(model: Model, share: Share, elements: float) -> Work:
    """SwiGLU or GeLU: fused one kernel each way; eager SwiGLU: silu and mul, backward silu and two muls."""
    size = share.element_bytes
    if not model.gated:
        return Work(
            forward=_traffic("gelu", 2 * size * elements), backward=_traffic("gelu backward", 4 * size * elements)
        )
    forward, backward = (3, 5) if share.fused else (5, 9)
    return Work(
        forward=_traffic("swiglu", forward * size * elements, 1 if share.fused else 2),
        backward=_traffic("swiglu backward", backward * size * elements, 1 if share.fused else 3),
    )


def _dense(model: Model, share: Share) -> Work:
    width = model.ffn_width // share.tp
    return _join(
        *_first_matmuls(model, share, width),
        _activation(model, share, float(share.tokens) * width),
        _linear("ffn out", share, n=model.hidden, k=width),
    )


def _first_matmuls(model: Model, share: Share, width: int, m: int | None = None, batch: int = 1) -> list[Work]:
    if not model.gated:
        return [_linear("ffn in", share, n=width, k=model.hidden, m=m, batch=batch)]
    if share.fused:
        return [_linear("gate and up", share, n=2 * width, k=model.hidden, m=m, batch=batch)]
    return [_linear(name, share, n=width, k=model.hidden, m=m, batch=batch) for name in ("gate", "up")]


def _routed(model: Model, experts: Experts, share: Share) -> Work:
    """Router, tokens to their experts and back, the experts of this rank as one grouped product per matrix.

    The busiest rank sets the pace: its experts see `imbalance` times the mean of tokens.
    """
    local = max(experts.count // share.ep, 1)
    visits = share.tokens * experts.per_token
    rows = max(round(visits * experts.imbalance / local), 1)
    width = max(experts.width // share.tp, 1)
    moved = 2.0 * share.element_bytes * visits * model.hidden
    works = [
        _linear("router", share, n=experts.count, k=model.hidden),
        Work(forward=_traffic("dispatch", moved, 2), backward=_traffic("dispatch backward", moved, 2)),
        *_first_matmuls(model, share, width, m=rows, batch=local),
        _activation(model, share, float(rows) * local * width),
        _linear("ffn out", share, n=model.hidden, k=width, m=rows, batch=local),
        Work(forward=_traffic("combine", moved, 2), backward=_traffic("combine backward", moved, 2)),
    ]
    if experts.shared:
        shared = max(experts.shared * experts.width // share.tp, 1)
        works += [
            *_first_matmuls(model, share, shared),
            _activation(model, share, float(share.tokens) * shared),
            _linear("shared out", share, n=model.hidden, k=shared),
        ]
    return _join(*works)


def _between(model: Model, share: Share) -> Work:
    """Two norms and two additions to the residual stream, each with its bias and dropout where the model has them."""
    elements, size = float(share.tokens_between) * model.hidden, share.element_bytes
    norm, back = 2 * size * elements, 5 * size * elements  # back: x, dy, dx, and both again for the weights
    mask = elements if model.dropout else 0.0
    add = 3 * size * elements + mask
    undo = 2 * size * elements + mask + 2 * size * elements if model.dropout else 0.0  # the mask, and the bias' sum
    return Work(
        forward=(*_traffic("norms", 2 * norm, 2), *_traffic("residual add", 2 * add, 2)),
        backward=(
            *_traffic("norms backward", 2 * back, 4),
            *_traffic("residual add backward", 2 * (3 * size * elements + undo), 4 if model.dropout else 2),
        ),
    )


def embedding(model: Model, share: Share) -> Work:
    """Rows looked up and, backward, added up; the first stage has it."""
    elements = float(share.tokens_between) * model.hidden
    extra = (2 * share.element_bytes + 1) * elements if model.dropout else 0.0
    return Work(
        forward=_traffic("embedding", 2 * share.element_bytes * elements + extra),
        backward=_traffic("embedding backward", 4 * share.element_bytes * elements + extra, 4),
    )


def head(model: Model, share: Share) -> Work:
    """Last norm, logits and loss; the last stage has it."""
    rows = max(model.vocab // share.tp, 1)
    logits = float(share.tokens) * rows * LOGIT_BYTES["fused" if share.fused else "eager"]
    elements, size = float(share.tokens_between) * model.hidden, share.element_bytes
    loss = Work(forward=_traffic("loss", logits / 2, 4), backward=_traffic("loss backward", logits / 2, 3))
    norm = Work(
        forward=_traffic("last norm", 2 * size * elements),
        backward=_traffic("last norm backward", 5 * size * elements, 2),
    )
    return _join(norm, _linear("logits", share, n=rows, k=model.hidden), loss)
