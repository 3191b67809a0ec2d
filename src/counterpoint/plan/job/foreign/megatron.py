"""Read arguments of Megatron-LM as a job; defaults are those of megatron/training/arguments.py."""

from __future__ import annotations

import re
from typing import Any

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.foreign.arguments import SEVERAL, find_arguments
from counterpoint.plan.job.foreign.reading import ForeignJob, Reading

WHAT = "arguments of Megatron-LM"
NEUTRAL = re.compile(
    r"""--(lr|min-lr|decoupled|weight-decay|start-weight|end-weight|adam-|sgd-|muon-|clip-grad|init-method|use-mup|train-|eval|log-|logging|save
    |load|no-load|no-save|tensorboard|wandb|data-|split|tokenizer|vocab-file|merge-file|tiktoken|num-workers|seed
    |distributed-(timeout|backend)|exit-|profile|use-pytorch-profiler|ckpt|dist-ckpt|async-save|master|node-rank|rdzv
    |local-rank|max-position|normalization|norm-epsilon|layernorm-epsilon|apply-layernorm-1p|rotary|rope|use-rope|yarn
    |mscale|position-embedding-type|no-rope|loss-scale|initial-loss|min-loss|hysteresis|attention-softmax
    |no-mmap|mock-data|no-create-attention|reset-|eod-|dataloader|manual-gc|use-mcore|no-check-for|check-for|rerun
    |legacy|use-legacy|legacy-|enable-experimental|calculate-per-token|empty-unused|no-one-logger|enable-one-logger|override
    |use-checkpoint|timing|no-barrier|make-vocab|iteration|rampup|auto-detect|finetune|adlr|job-name|output|nodes$
    |gpus-per-node|moe-aux|moe-z-loss|moe-router-(load|aux|score|bias|enable|pre|group|num-groups|topk-scal|dtype|force)
    |moe-token-drop|moe-per-layer|moe-grouped-gemm|moe-token-dispatcher-type|mtp-loss|spec$|export-|disable-bf16|num-query-groups
    |partition|account$|time$|ntasks|exclusive|container|mpi|export$|dependency|activation-func-clamp|glu-linear
    |softmax-type|enable-gpt-oss|inference|use-dist-ckpt|high-priority|te-rng|deterministic|init-model-with|DDP-impl
    |hidden-dropout|attention-dropout|no-masked-softmax-fusion|transformer-impl|attention-backend|test-mode|untie).*""",
    re.VERBOSE,
)
REFUSED = {  # arguments that change what a step computes so much that leaving them out would be wrong
    "hybrid-layer-pattern": "Mamba", "hybrid-override-pattern": "Mamba", "is-hybrid-model": "Mamba",
    "linear-attention-freq": "linear attention", "heterogeneous-layers-config-path": "layers that differ",
    "encoder-num-layers": "an encoder", "pipeline-model-parallel-layout": "stages that were dealt by hand",
    "decoder-first-pipeline-num-layers": "uneven stages", "decoder-last-pipeline-num-layers": "uneven stages",
}  # fmt: skip


FP8_SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8")
LAUNCHED = (("nodes", "slurm-nodes"), ("gpus-per-node", "slurm-gpus-per-node", "slurm-ntasks-per-node"))


def read_megatron(text: str) -> ForeignJob:
    """Return the job of Megatron-LM's arguments, as far as they say it."""
    reading = Reading(WHAT, {f"--{name}": value for name, value in find_arguments(text).items()})
    for name, why in REFUSED.items():
        if reading.values.get(f"--{name}") not in (None, "false", "False", "None"):
            raise Misconfigured(f"--{name} in {WHAT}: {why} cannot be planned; leave it out, or give a job")
    tp = _whole(reading, "tensor-model-parallel-size") or 1
    model = _model(reading, tp)
    training, parallel = _training(reading), _parallel(reading, model["layers"], tp)
    per_replica = None
    if "global_batch" not in training:
        per_replica = training["micro_batch"]
        reading.say("assumed: one micro-batch for each replica, as without --global-batch-size")
    if "dp" not in parallel and (found := _replicas(reading, parallel)):
        parallel["dp"] = found
    tables = {"model": model, "training": training, "parallel": parallel}
    return ForeignJob(what=WHAT, tables=tables, notes=reading.notes(NEUTRAL), per_replica=per_replica)


def _one(reading: Reading, name: str) -> str | None:
    """Return the value of an argument; Misconfigured if it has several, or one that the script does not say."""
    value = reading.take(f"--{name}")
    if value is None:
        return None
    text = str(value)
    if SEVERAL in text:
        given = ", ".join(printable(each, 40) for each in text.split(SEVERAL)[:8])
        raise Misconfigured(f"--{name} has several values in {WHAT}: {given}; leave one of them in the file")
    if "$" in text:
        raise Misconfigured(f"--{name} {printable(text, 80)} in {WHAT}: the file does not set that; write the value")
    return text


def _whole(reading: Reading, name: str, *, least: int = 1) -> int | None:
    return None if _one(reading, name) is None else reading.whole(f"--{name}", least=least)


def _is(reading: Reading, name: str) -> bool:
    """Return whether a switch is there, and not set to false."""
    value = _one(reading, name)
    return value is not None and value.lower() not in ("false", "0", "no")


def _needed(reading: Reading, name: str) -> int:
    found = _whole(reading, name)
    if found is None:
        raise Misconfigured(f"{WHAT} without --{name}: add it")
    return found


def _model(reading: Reading, tp: int) -> dict[str, Any]:
    hidden, layers, heads = (_needed(reading, name) for name in ("hidden-size", "num-layers", "num-attention-heads"))
    gated = any([_is(reading, "swiglu"), _is(reading, "quick-geglu"), _is(reading, "gated-linear-unit")])
    relu = _is(reading, "squared-relu")
    ffn = _whole(reading, "ffn-hidden-size")
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    model: dict[str, Any] = {
        "name": "megatron", "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "gated": gated,
        "tied": _is_tied(reading), "qk_norm": False, "bias": _bias(reading), "rotary": _rotates(reading),
        "dropout": _drops(reading),
    }  # fmt: skip
    if relu and gated:
        raise Misconfigured(f"--squared-relu with --swiglu in {WHAT}: leave one of them in the file")
    if _is(reading, "multi-latent-attention"):
        model["mla"] = _latent(reading)
        _is(reading, "qk-layernorm")
        reading.take("--kv-channels")
    else:
        model["qk_norm"] = _is(reading, "qk-layernorm")
        model["head_dim"] = _whole(reading, "kv-channels")
        groups = _whole(reading, "num-query-groups")
        grouped = _one(reading, "group-query-attention")  # a printed list has it with false, and one group
        if groups is not None if grouped is None else _is(reading, "group-query-attention"):
            model["kv_heads"] = groups or 1
    if (vocab := _vocabulary(reading, tp)) is not None:
        model["vocab"] = vocab
    model |= _window(reading)
    if (experts := _experts(reading, layers, ffn)) is not None:
        model["experts"] = experts
    model["mtp"] = _whole(reading, "mtp-num-layers", least=0) or 0
    return {name: value for name, value in model.items() if value is not None}


def _is_tied(reading: Reading) -> bool:
    shared = _one(reading, "share-embeddings")
    untied = _is(reading, "untie-embeddings-and-output-weights")
    return shared.lower() == "true" if shared is not None else not untied


def _bias(reading: Reading) -> str:
    plain = _one(reading, "add-bias-linear")
    none = _is(reading, "disable-bias-linear") or (plain is not None and plain.lower() == "false")
    qkv = _is(reading, "add-qkv-bias")
    return "all" if not none else "qkv" if qkv else "none"


def _rotates(reading: Reading) -> bool:
    kind = _one(reading, "position-embedding-type")
    return _is(reading, "use-rotary-position-embeddings") or kind in ("rope", "yarn", "mrope")


def _drops(reading: Reading) -> bool:
    parts = [_one(reading, name) for name in ("hidden-dropout", "attention-dropout")]
    if parts == [None, None]:
        reading.say("assumed: dropout, as Megatron-LM's default of 0.1 is; --hidden-dropout 0 means none")
    return any(part is None or part.strip("0.") != "" for part in parts)


def _latent(reading: Reading) -> dict[str, int]:
    found = {
        "kv_lora_rank": _whole(reading, "kv-lora-rank") or 32,
        "qk_nope_head_dim": _whole(reading, "qk-head-dim") or 128,
        "qk_rope_head_dim": _whole(reading, "qk-pos-emb-head-dim") or 64,
        "v_head_dim": _whole(reading, "v-head-dim") or 128,
    }
    rank = _whole(reading, "q-lora-rank", least=0)
    return found | ({"q_lora_rank": rank} if rank else {})


def _vocabulary(reading: Reading, tp: int) -> int | None:
    """Return the rows of the embedding, padded as Megatron-LM pads them; None: the tokenizer decides."""
    if (padded := _whole(reading, "padded-vocab-size")) is not None:
        reading.take("--vocab-size")
        return padded
    rows = _whole(reading, "vocab-size")
    unit = (_whole(reading, "make-vocab-size-divisible-by") or 128) * tp
    return None if rows is None else -(-rows // unit) * unit


def _window(reading: Reading) -> dict[str, int]:
    size = _one(reading, "window-size")
    every = _whole(reading, "window-attn-skip-freq")
    if size is None:
        return {}
    match = re.fullmatch(r"[(\[]?\s*(\d{1,9})\s*[, ]\s*0\s*[)\]]?", size)
    if match is None:
        raise reading.wrong(("--window-size",), size, "give two numbers, the second of them 0, as in 127,0")
    return {"window": int(match.group(1)) + 1} | ({"full_every": every} if every else {})


def _experts(reading: Reading, layers: int, ffn: int) -> dict[str, int] | None:
    count = _whole(reading, "num-experts", least=0)
    if not count:
        return None
    width = _whole(reading, "moe-ffn-hidden-size") or ffn
    shared = _whole(reading, "moe-shared-expert-intermediate-size", least=0) or 0
    if shared % width:
        raise reading.wrong(("--moe-shared-expert-intermediate-size",), shared, f"give a multiple of {width}")
    every, first = _frequency(reading, layers)
    return {
        "count": count, "per_token": _whole(reading, "moe-router-topk") or 2, "width": width,
        "shared": shared // width, "every": every, "first_dense": first,
    }  # fmt: skip


def _frequency(reading: Reading, layers: int) -> tuple[int, int]:
    """Return how often a layer has experts, and how many at the beginning have none: of 2, or of ([0]*3+[1]*58)."""
    given = (_one(reading, "moe-layer-freq") or "1").replace(" ", "")
    if given.isdecimal():
        return max(int(given[:6]), 1), 0
    listed = re.fullmatch(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?", given)
    if listed and int(listed.group(1)) + int(listed.group(2)) == layers:
        return 1, int(listed.group(1))
    plain = re.fullmatch(r"\[?((?:0,)*)((?:1,?)+)\]?", given)
    if plain and given.count("0") + given.count("1") == layers:
        return 1, given.count("0")
    advice = f"give a number, or ([0]*dense+[1]*others) that adds up to {layers} layers"
    raise reading.wrong(("--moe-layer-freq",), given, advice)


def _training(reading: Reading) -> dict[str, Any]:
    found: dict[str, Any] = {
        "micro_batch": _whole(reading, "micro-batch-size") or 1, **_precision(reading),
        **_recomputation(reading), "flash_attention": _flash(reading), "cuda_graphs": _replays(reading),
        "fused_accumulation": not _is(reading, "no-gradient-accumulation-fusion")
        and _one(reading, "gradient-accumulation-fusion") not in ("False", "false"),
    }  # fmt: skip
    if (sequence := _whole(reading, "seq-length")) is not None:
        found["sequence"] = sequence
    if (batch := _whole(reading, "global-batch-size")) is not None:
        found["global_batch"] = batch
    optimizer = _one(reading, "optimizer") or "adam"
    if optimizer not in ("adam", "sgd"):
        raise reading.wrong(("--optimizer",), optimizer, "allowed are adam and sgd")
    found["optimizer"] = optimizer
    half = _is(reading, "grad-reduce-in-bf16") or (
        found["precision"] == "fp16" and not _is(reading, "accumulate-allreduce-grads-in-fp32")
    )
    _is(reading, "accumulate-allreduce-grads-in-fp32")
    found["grad_bytes"] = 2 if half else 4
    return found


def _precision(reading: Reading) -> dict[str, Any]:
    eight = (_one(reading, "fp8-format") or "false").lower() not in ("false", "none")
    half, brain = _is(reading, "fp16"), _is(reading, "bf16")
    named = _one(reading, "mixed-precision") or _one(reading, "precision") or ""  # of Megatron-Bridge and NeMo
    recipe = _one(reading, "fp8-recipe") or "delayed"
    if eight or "fp8" in named:
        if recipe not in FP8_SCALINGS:
            raise reading.wrong(("--fp8-recipe",), recipe, f"allowed are {', '.join(FP8_SCALINGS)}")
        attention = any([_is(reading, "fp8-dot-product-attention"), _is(reading, "fp8-multi-head-attention")])
        return {"precision": "fp8", "fp8_scaling": recipe, "fp8_attention": attention}
    return {"precision": "bf16" if brain or "bf16" in named else "fp16" if half or "16" in named else "fp32"}


def _replays(reading: Reading) -> bool:
    """Return whether layers are replayed as CUDA graphs."""
    kind = _one(reading, "cuda-graph-impl")
    named = any([_is(reading, "enable-cuda-graph"), _is(reading, "external-cuda-graph")])
    return named or kind not in (None, "none")


def _recomputation(reading: Reading) -> dict[str, Any]:
    kind = _one(reading, "recompute-granularity")
    old = _one(reading, "checkpoint-activations") or _one(reading, "activations-checkpoint-method")
    method, number = _one(reading, "recompute-method"), _whole(reading, "recompute-num-layers")
    modules = _one(reading, "recompute-modules")
    if kind not in (None, "full", "selective", "none"):
        raise reading.wrong(("--recompute-granularity",), kind, "allowed are full and selective")
    if kind is None and old is not None and old.lower() != "false":
        kind = "full"
    if kind is None and _is(reading, "recompute-activations"):
        kind = "selective"
    if kind == "full" and method == "block":
        reading.say(f"assumed: all layers are computed again, not {number} of each part (--recompute-method block)")
    if kind == "selective" and modules not in (None, "core_attn"):
        reading.say(f"assumed: attention's core is computed again, not {printable(str(modules), 80)}")
    return {"recompute": kind or "none"}


def _flash(reading: Reading) -> bool:
    backend, transformer = _one(reading, "attention-backend"), _one(reading, "transformer-impl")
    if _is(reading, "use-flash-attn"):
        return True
    if backend is not None:
        return not any(slow in backend for slow in ("unfused", "local"))
    if transformer == "local":
        return False
    reading.say("assumed: flash attention; --set training.flash_attention=false for Megatron-LM before 2023")
    return True


def _parallel(reading: Reading, layers: int, tp: int) -> dict[str, Any]:
    pp = _whole(reading, "pipeline-model-parallel-size") or 1
    found: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": _whole(reading, "context-parallel-size") or 1,
        "ep": _whole(reading, "expert-model-parallel-size") or 1,
        "zero": _zero(reading), "overlap_tp": True,
    }  # fmt: skip
    sequence = _is(reading, "sequence-parallel")
    found["sequence"] = sequence
    overlapped = [_is(reading, "overlap-grad-reduce"), _one(reading, "DDP-impl") == "torch", found["zero"] == 3]
    found["overlap_dp"] = any(overlapped)
    _is(reading, "overlap-param-gather")
    expert_tp = _whole(reading, "expert-tensor-parallel-size")
    if expert_tp == 1 and tp > 1:
        found["expert_tp"] = 1
    elif expert_tp is not None and expert_tp != tp:
        raise reading.wrong(("--expert-tensor-parallel-size",), expert_tp, f"allowed are 1 and {tp}, as other matrices")
    each, parts = _whole(reading, "num-layers-per-virtual-pipeline-stage"), _whole(reading, "virtual-stages")
    if each is not None and layers % (pp * each):
        raise reading.wrong(
            ("--num-layers-per-virtual-pipeline-stage",), each, f"give a divisor of {layers} layers / {pp} stages"
        )
    virtual = layers // pp // each if each is not None else parts or 1
    no_overlap = _is(reading, "no-overlap-p2p-communication")
    if virtual > 1:
        found |= {"virtual": virtual, "schedule": "interleaved"}
    found["overlap_pp"] = virtual > 1 and not no_overlap
    ends = [_is(reading, f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    if any(ends):
        found["ends_count"] = True
        if not all(ends):
            reading.say("assumed: embedding and loss both count as a layer, though the file says so of one")
    return found


def _zero(reading: Reading) -> int:
    fsdp = any([_is(reading, "use-megatron-fsdp"), _is(reading, "use-custom-fsdp")])
    strategy = _one(reading, "data-parallel-sharding-strategy")
    distributed, torch = _is(reading, "use-distributed-optimizer"), _is(reading, "use-torch-fsdp2")
    if torch:
        return 3
    if fsdp:
        known = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3, None: 3}
        if strategy not in known:
            allowed = "allowed are no_shard, optim, optim_grads, optim_grads_params"
            raise reading.wrong(("--data-parallel-sharding-strategy",), strategy, allowed)
        return known[strategy]
    return 1 if distributed else 0


def _replicas(reading: Reading, parallel: dict[str, Any]) -> int | None:
    """Return the replicas if the file says how many GPUs there are, by its launcher or Slurm."""
    gpus = _maybe(reading, "world-size")
    if gpus is None:
        counts = [[found for name in names if (found := _maybe(reading, name))] for names in LAUNCHED]
        gpus = counts[0][0] * counts[1][0] if all(counts) else None
    replica: int = parallel["tp"] * parallel["pp"] * parallel["cp"]
    if gpus is None:
        return None
    if gpus % replica:
        reading.say(f"the file's launcher starts {gpus} GPUs, which tp · pp · cp = {replica} does not divide")
        return None
    return gpus // replica


def _maybe(reading: Reading, name: str) -> int | None:
    """Return a number, None where the file has none, several, or leaves it to its environment."""
    value = str(reading.take(f"--{name}"))
    number = int(value) if value.isdecimal() and len(value) < 9 else 0
    return number or None
