"""Read the arguments of Megatron-LM as a job: either the list that a run prints before its first step, or YAML.

    num_layers ............ 32           the list; it has every argument
    num_layers: 32                       YAML, also of Megatron-Bridge: the names of tables above a key do not matter

Defaults of arguments that YAML leaves out are those of megatron/training/arguments.py. A shell script is refused: only
a shell knows which of its variables and branches count; the printed list has the result.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.foreign.reading import ForeignJob, Reading
from counterpoint.plan.job.parallel import RecomputeModule

WHAT = "arguments of Megatron-LM"
PRINTED = re.compile(r"^[ \t]*(?:\S+[ \t]+)?([A-Za-z]\w*) \.{3,} (.*)$", re.M)
YAML = re.compile(r"^[ \t]*(?:- )?([A-Za-z_]\w*)[ \t]*:[ \t]+(\S.*)$", re.M)
SCRIPT = re.compile(r"(^|[\s\"'(])--num-layers\b", re.M)
NOTHING = ("None", "null", "~", "")
NEUTRAL = re.compile(
    r"""(lr|min_lr|decoupled|weight_decay|start_weight|end_weight|adam_|sgd_|muon_|clip_grad|init_method|use_mup|train_
    |eval|log_|logging|save|load|no_load|no_save|tensorboard|wandb|data_|split|tokenizer|vocab_file|merge_file|tiktoken
    |num_workers|seed|distributed_(timeout|backend)|exit_|profile|use_pytorch_profiler|ckpt|dist_ckpt|async_save|master
    |node_rank|rank$|local_rank|max_position|normalization|norm_epsilon|layernorm_epsilon|apply_layernorm_1p|rotary|rope
    |use_rope|yarn|mscale|position_embedding_type|no_rope|loss_scale|initial_loss|min_loss|hysteresis|attention_softmax
    |mmap|mock_data|create_attention|reset_|eod_|dataloader|manual_gc|use_mcore|check_for|rerun|legacy|use_legacy
    |enable_experimental|calculate_per_token|empty_unused|one_logger|enable_one_logger|override|use_checkpoint|timing
    |barrier|make_vocab|iteration|rampup|auto_detect|finetune|adlr|job_name|output|consumed_|params_dtype|moe_aux
    |moe_z_loss|moe_router_(load|aux|score|bias|enable|pre|group|num_groups|topk_scal|dtype|force)|moe_token_drop
    |moe_per_layer|moe_grouped_gemm|moe_token_dispatcher_type|mtp_loss|spec$|export_|num_query_groups|account$|dependency
    |activation_func_clamp|glu_linear|softmax_type|enable_gpt_oss|inference|use_dist_ckpt|high_priority|te_rng
    |deterministic|DDP_impl|masked_softmax_fusion|world_size|untie).*""",
    re.VERBOSE,
)
REFUSED = {  # arguments that change what a step computes so much that leaving them out would be wrong
    "hybrid_layer_pattern": "Mamba", "hybrid_override_pattern": "Mamba", "is_hybrid_model": "Mamba",
    "linear_attention_freq": "linear attention", "heterogeneous_layers_config_path": "layers that differ",
    "encoder_num_layers": "an encoder", "pipeline_model_parallel_layout": "stages that were dealt by hand",
}  # fmt: skip
FP8_SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8")
FSDP = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}  # zero of each sharding strategy


def is_megatron(text: str) -> bool:
    """Return whether a text is Megatron-LM's printed list, YAML or script, by how it states the number of layers."""
    return SCRIPT.search(text) is not None or re.search(r"\bnum_layers( \.{3,}|[ \t]*:[ \t]) *\d", text) is not None


def read_megatron(text: str) -> ForeignJob:
    """Return the job that Megatron-LM's arguments describe, maybe in part; raise Misconfigured for a shell script."""
    pairs = PRINTED.findall(text)
    if not pairs and SCRIPT.search(text):
        raise Misconfigured(
            f"a script with {WHAT}: give the list of arguments that its run prints, from num_layers .... on, or YAML"
        )
    reading = Reading(WHAT, _arguments(pairs or YAML.findall(text)))
    for name, why in REFUSED.items():
        if reading.values.get(name) not in (None, "false", "False"):
            raise Misconfigured(f"{name} in {WHAT}: {why} cannot be planned; leave it out, or give a job")
    parallel = _parallel(reading)
    tables = {"model": _model(reading, parallel["tp"]), "training": _training(reading), "parallel": parallel}
    return ForeignJob(what=WHAT, tables=tables, notes=reading.notes(NEUTRAL))


def _arguments(pairs: list[tuple[str, str]]) -> dict[str, object]:
    """Return the arguments by name, without empty ones; several values of one name become a tuple."""
    found: dict[str, dict[str, None]] = {}
    for name, text in pairs:
        value = text.strip().strip("\"'")
        if value not in NOTHING:
            found.setdefault(name, {})[value] = None
    return {name: next(iter(values)) if len(values) == 1 else tuple(values) for name, values in found.items()}


def _any(reading: Reading, *names: str) -> bool:
    """Return whether at least one of several switches is on, and count all of them as read."""
    found = [reading.truth(name) for name in names]
    return any(found)


def _model(reading: Reading, tp: int) -> dict[str, Any]:
    hidden, layers = reading.needed("hidden_size"), reading.needed("num_layers")
    gated, relu = _any(reading, "swiglu", "quick_geglu", "gated_linear_unit"), reading.truth("squared_relu")
    if relu and gated:
        raise Misconfigured(f"squared_relu with a gated unit in {WHAT}: leave one of them in the file")
    ffn = reading.whole("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    tied = not reading.truth("untie_embeddings_and_output_weights")
    biased, qkv = reading.truth("add_bias_linear", default=True), reading.truth("add_qkv_bias")
    model: dict[str, Any] = {
        "name": "megatron", "layers": layers, "hidden": hidden, "heads": reading.needed("num_attention_heads"),
        "ffn": ffn, "gated": gated, "tied": reading.truth("share_embeddings_and_output_weights", default=tied),
        "bias": "all" if biased else "qkv" if qkv else "none",
        "rotary": reading.word("position_embedding_type") in ("rope", "yarn", "mrope"),
        "dropout": _drops(reading), "vocab": _vocabulary(reading, tp), "experts": _experts(reading, layers, ffn),
        "mtp": reading.whole("mtp_num_layers", least=0) or 0, **_window(reading),
    }  # fmt: skip
    norm, channels = reading.truth("qk_layernorm"), reading.whole("kv_channels")
    groups = reading.whole("num_query_groups")
    if reading.truth("multi_latent_attention"):
        model |= {"mla": _latent(reading), "qk_norm": False}
    else:
        grouped = reading.truth("group_query_attention", default=groups is not None)
        model |= {"qk_norm": norm, "head_dim": channels, "kv_heads": (groups or 1) if grouped else None}
    return {name: value for name, value in model.items() if value is not None}


def _drops(reading: Reading) -> bool:
    names = ("hidden_dropout", "attention_dropout")
    if not any(name in reading.values for name in names):
        reading.say("assumed: dropout, as Megatron-LM's default of 0.1 is; hidden_dropout: 0 means none")
    rates = [reading.number(name) if name in reading.values else 0.1 for name in names]
    return any(rates)


def _latent(reading: Reading) -> dict[str, int]:
    found = {
        "kv_lora_rank": reading.whole("kv_lora_rank") or 32,
        "qk_nope_head_dim": reading.whole("qk_head_dim") or 128,
        "qk_rope_head_dim": reading.whole("qk_pos_emb_head_dim") or 64,
        "v_head_dim": reading.whole("v_head_dim") or 128,
    }
    rank = reading.whole("q_lora_rank", least=0)
    return found | ({"q_lora_rank": rank} if rank else {})


def _vocabulary(reading: Reading, tp: int) -> int | None:
    """Return the number of embedding rows, padded as by Megatron-LM; None: the tokenizer decides."""
    rows, unit = reading.whole("vocab_size"), (reading.whole("make_vocab_size_divisible_by") or 128) * tp
    return reading.whole("padded_vocab_size") or (None if rows is None else -(-rows // unit) * unit)


def _window(reading: Reading) -> dict[str, int]:
    size, every = reading.word("window_size"), reading.whole("window_attn_skip_freq")
    if size is None:
        return {}
    match = re.fullmatch(r"[(\[]?\s*(\d{1,9})\s*[, ]\s*0\s*[)\]]?", size)
    if match is None:
        raise reading.wrong(("window_size",), size, "give two numbers, the second of them 0, as in 127,0")
    return {"window": int(match.group(1)) + 1} | ({"full_every": every} if every else {})


def _experts(reading: Reading, layers: int, ffn: int) -> dict[str, int] | None:
    count = reading.whole("num_experts", "num_moe_experts", least=0)
    if not count:
        return None
    width = reading.whole("moe_ffn_hidden_size") or ffn
    shared = reading.whole("moe_shared_expert_intermediate_size", least=0) or 0
    if shared % width:
        raise reading.wrong(("moe_shared_expert_intermediate_size",), shared, f"give a multiple of {width}")
    every, first = _frequency(reading, layers)
    return {
        "count": count, "per_token": reading.whole("moe_router_topk") or 2, "width": width,
        "shared": shared // width, "every": every, "first_dense": first,
    }  # fmt: skip


def _frequency(reading: Reading, layers: int) -> tuple[int, int]:
    """Return (n, d) from "2" or "[0, 0, 0, 1, ...]": after d dense layers, every n-th layer has experts."""
    given = (reading.word("moe_layer_freq") or "1").replace(" ", "")
    if given.isdecimal():
        return max(int(given[:6]), 1), 0
    listed = re.fullmatch(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?", given)
    if listed and int(listed.group(1)) + int(listed.group(2)) == layers:
        return 1, int(listed.group(1))
    plain = re.fullmatch(r"\[?((?:0,)*)((?:1,?)+)\]?", given)
    if plain and given.count("0") + given.count("1") == layers:
        return 1, given.count("0")
    advice = f"give a number, or ([0]*dense+[1]*others) that adds up to {layers} layers"
    raise reading.wrong(("moe_layer_freq",), given, advice)


def _training(reading: Reading) -> dict[str, Any]:
    precision = _precision(reading)
    half = _any(reading, "grad_reduce_in_bf16") or (
        precision["precision"] == "fp16" and not reading.truth("accumulate_allreduce_grads_in_fp32")
    )
    part = "optimizer_offload_fraction"
    offloaded = reading.number(part) if part in reading.values else 1.0  # of the optimizer's states, on the host
    graphs = reading.word("cuda_graph_impl") not in (None, "none")
    found = {
        "sequence": reading.whole("seq_length"), "global_batch": reading.whole("global_batch_size"),
        "micro_batch": reading.whole("micro_batch_size") or 1, **precision, **_recomputation(reading),
        "flash_attention": _flash(reading),
        "cuda_graphs": _any(reading, "enable_cuda_graph", "external_cuda_graph") or graphs,
        "fused_accumulation": reading.truth("gradient_accumulation_fusion", default=True),
        "optimizer": reading.word("optimizer", allowed=("adam", "sgd")) or "adam", "grad_bytes": 2 if half else 4,
        "offload_optimizer": offloaded if reading.truth("optimizer_cpu_offload") else None,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _precision(reading: Reading) -> dict[str, Any]:
    half, brain = reading.truth("fp16"), reading.truth("bf16")
    named = reading.word("mixed_precision", "precision") or ""  # of Megatron-Bridge and NeMo
    eight = (reading.word("fp8", "fp8_format") or "false").lower() not in ("false", "none")
    recipe = reading.word("fp8_recipe", allowed=FP8_SCALINGS if eight or "fp8" in named else ()) or "delayed"
    if eight or "fp8" in named:
        attention = _any(reading, "fp8_dot_product_attention", "fp8_multi_head_attention")
        return {"precision": "fp8", "fp8_scaling": recipe, "fp8_attention": attention}
    return {"precision": "bf16" if brain or "bf16" in named else "fp16" if half or "16" in named else "fp32"}


def _recomputation(reading: Reading) -> dict[str, Any]:
    kind = reading.word("recompute_granularity", allowed=("full", "selective", "none")) or "none"
    method, number = reading.word("recompute_method"), reading.whole("recompute_num_layers") or 1
    named = re.findall(r"\w+", reading.word("recompute_modules") or "core_attn")
    if kind == "full" and method in ("block", "uniform") and number > (method == "uniform"):
        return {"recompute": "full", "recompute_method": method, "recompute_num_layers": number}
    if kind != "selective":
        return {"recompute": kind}
    known = [module for module in get_args(RecomputeModule) if module in named]
    if other := [module for module in named if module not in known]:
        reading.say(f"assumed: of recompute_modules, {printable(' '.join(other), 80)} is kept, not computed again")
    return {"recompute": "selective", "recompute_modules": known} if known else {"recompute": "none"}


def _flash(reading: Reading) -> bool:
    backend, transformer = reading.word("attention_backend"), reading.word("transformer_impl")
    if reading.truth("use_flash_attn"):
        return True
    if backend is None and transformer is None:
        reading.say("assumed: flash attention; --set training.flash_attention=false for Megatron-LM before 2023")
    slow = transformer == "local" if backend is None else any(each in backend for each in ("unfused", "local"))
    return not slow


def _parallel(reading: Reading) -> dict[str, Any]:
    tp, pp = reading.whole("tensor_model_parallel_size") or 1, reading.whole("pipeline_model_parallel_size") or 1
    names = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    virtual, zero = reading.whole(*names) or 1, _zero(reading)
    found: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": reading.whole("context_parallel_size") or 1,
        "ep": reading.whole("expert_model_parallel_size") or 1, "zero": zero,
        "sequence": reading.truth("sequence_parallel"),
        "overlap_dp": reading.truth("overlap_grad_reduce") or zero == 3,
        "overlap_pp": reading.truth("overlap_p2p_comm", default=True) and virtual > 1,
    }  # fmt: skip
    if virtual > 1:
        found |= {"virtual": virtual, "schedule": "interleaved"}
    reading.take("overlap_param_gather")
    expert_tp = reading.whole("expert_tensor_parallel_size") or tp
    if expert_tp not in (1, tp):
        raise reading.wrong(("expert_tensor_parallel_size",), expert_tp, f"allowed are 1 and {tp}, as other matrices")
    if expert_tp != tp:
        found["expert_tp"] = 1
    if stages := _uneven(reading, pp, virtual):
        found["stage_layers"] = stages
    ends = [reading.truth(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")]
    if any(ends):
        found["ends_count"] = True
        if not all(ends):
            reading.say("assumed: embedding and loss both count as a layer, though the file says so of one")
    replicas, left = divmod(reading.whole("world_size") or 0, tp * pp * found["cp"])
    if dp := reading.whole("data_parallel_size") or (0 if left else replicas):
        found["dp"] = dp
    return found


def _uneven(reading: Reading, pp: int, virtual: int) -> list[int]:
    """Return the number of layers of each stage if the first or last stage has its own number; empty if neither has."""
    layers = reading.needed("num_layers")
    ends = [reading.whole(f"decoder_{end}_pipeline_num_layers", least=0) for end in ("first", "last")]
    if ends == [None, None]:
        return []
    others, left = pp - sum(end is not None for end in ends), layers - sum(end or 0 for end in ends)
    if virtual > 1 or others < 1 or left < 0 or left % others:
        raise Misconfigured(
            f"decoder_first_, _last_pipeline_num_layers = {ends}, {layers} layers, {pp} stages of {virtual} parts: "
            "give numbers that leave as many layers for every other stage, of one part; or a job with stage_layers"
        )
    first, last = ends
    return [*([] if first is None else [first]), *[left // others] * others, *([] if last is None else [last])]


def _zero(reading: Reading) -> int:
    fsdp, torch = _any(reading, "use_megatron_fsdp", "use_custom_fsdp"), reading.truth("use_torch_fsdp2")
    strategy, distributed = reading.word("data_parallel_sharding_strategy"), reading.truth("use_distributed_optimizer")
    if fsdp and strategy not in (None, *FSDP):
        raise reading.wrong(("data_parallel_sharding_strategy",), strategy, f"allowed are {', '.join(FSDP)}")
    if torch or fsdp:
        return 3 if torch else FSDP[strategy or "optim_grads_params"]
    return 1 if distributed else 0
