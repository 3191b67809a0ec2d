"""Read a Hugging Face config.json: it gives the model, but nothing about the training.

The names of widths, and the properties that a kind of model has although its file does not state them, are from
`transformers` (src/transformers/models/*/configuration_*.py and modeling_*.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.foreign.reading import ForeignJob, Reading

WHAT = "config.json of Hugging Face"


class ModelKind(NamedTuple):
    """Describes the properties that all models of one `model_type` have although config.json does not state them."""

    gated: bool = True
    tied: bool = False  # where the file does not say
    bias: str | None = None  # where the file does not say; None: no bias
    rotary: bool | None = None  # None: if gated
    qk_norm: bool = False
    norms: int = 2
    windows: bool = False  # `sliding_window` is used without any other field
    full_every: int | None = None  # layers with a window between those without, where the file does not list them


LLAMA, WINDOWED = ModelKind(), ModelKind(windows=True)
GPT2 = ModelKind(gated=False, tied=True, bias="all")
KINDS: dict[str, ModelKind] = {
    "llama": LLAMA, "granite": LLAMA, "granitemoe": LLAMA, "smollm3": LLAMA, "minimax_m2": ModelKind(qk_norm=True),
    "deepseek_v2": LLAMA, "deepseek_v3": LLAMA, "kimi_k2": LLAMA, "glm4_moe": LLAMA,
    "mistral": WINDOWED, "mixtral": WINDOWED, "phi3": WINDOWED, "olmo": LLAMA,
    "olmo2": ModelKind(qk_norm=True), "olmo3": ModelKind(qk_norm=True, full_every=4), "olmoe": ModelKind(qk_norm=True),
    "qwen2": ModelKind(bias="qkv"), "qwen2_moe": ModelKind(bias="qkv"), "qwen3": ModelKind(qk_norm=True),
    "qwen3_moe": ModelKind(qk_norm=True), "seed_oss": ModelKind(bias="qkv"), "ernie4_5": LLAMA, "ernie4_5_moe": LLAMA,
    "gpt_oss": ModelKind(bias="all", full_every=2), "llama4_text": ModelKind(full_every=4),
    "gemma": ModelKind(tied=True), "gemma2": ModelKind(tied=True, norms=4, full_every=2),
    "gemma3_text": ModelKind(tied=True, norms=4, qk_norm=True, full_every=6),
    "cohere": ModelKind(tied=True, norms=1), "cohere2": ModelKind(tied=True, norms=1, full_every=4),
    "nemotron": ModelKind(gated=False, bias="none", rotary=True), "grok-1": ModelKind(tied=True, norms=4),
    "starcoder2": ModelKind(gated=False, bias="all", rotary=True, windows=True),
    "gpt_neox": ModelKind(gated=False, bias="all", rotary=True), "gpt2": GPT2, "gpt_bigcode": GPT2, "opt": GPT2,
}  # fmt: skip
NESTED = {  # kinds whose text model is in `text_config`, and its kind where that is not said
    "gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral", "qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "llava": "llama",
}  # fmt: skip
SAME_KIND = {
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
NEUTRAL = re.compile(
    r"""_name_or_path|transformers_version|architectures|auto_map|model_type|.*_token(_id|_index)?|.*_token_ids|use_cache
    |initializer_.*|.*_init(ializer)?_.*|rope_.*|rotary_.*|partial_rotary_factor|.*_theta|max_position_embeddings
    |n_positions|n_ctx|max_seq_len|max_sequence_length|.*(norm|layernorm|layer_norm)_(eps|epsilon)|.*_eps
    |torch_dtype|dtype|.*(multiplier|scaling_factor|_scale|scale_attn.*|scaling)|.*softcapping|query_pre_attn_scalar
    |output_.*|return_.*|summary_.*|task_specific_params|problem_type|id2label|label2id|pretraining_tp|ep_size
    |(router_)?(aux_loss_|z_loss_|jitter_).*|.*aux_loss.*|seq_aux|router_.*|routed_scaling_factor|norm_topk_prob
    |n_group|topk_group|topk_method|scoring_func|swiglu_limit|swiglu_alpha|max_window_layers|attn_temperature_tuning
    |attention_dropout|attn_pdrop|floor_scale|attn_scale|no_rope_layer.*|for_llm_compressor|cache_implementation
    |reorder_and_upcast_attn|vision_config|use_bfloat16|activation_function|hidden_act(ivation)?|hidden_activation
    |head_dim_original|use_sliding_window|clip_qkv|image_.*|mm_.*|chunk_size_feed_forward|is_encoder_decoder|quantization_config
    |qk_head_dim|is_decoder|classifier_dropout|moe_norm_min|moe_layers|init_std|layerdrop|attention_out_bias
    |embd_pdrop|embedding_dropout|initial_context_length|experts_per_token|word_embed_proj_dim|do_layer_norm_before|mlp_only_layers|rms_norm|use_qk_norm_.*|text_config|resid_dropout
    |num_key_value_groups|rope_parameters|original_max_position_embeddings|.*_bidirectional_.*|tie_encoder_decoder""",
    re.VERBOSE,
)
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def read_config(values: Mapping[str, Any]) -> ForeignJob:
    """Return the model that a config.json describes; raise Misconfigured if its `model_type` is not supported."""
    kind_name = values.get("model_type")
    inner = values.get("text_config")
    nested = isinstance(inner, Mapping) and str(kind_name) in NESTED
    if isinstance(inner, Mapping) and nested:
        merged = {"tie_word_embeddings": values.get("tie_word_embeddings")} | dict(inner)
        kind_name, values = inner.get("model_type", NESTED[str(kind_name)]), merged
    kind = KINDS.get(SAME_KIND.get(str(kind_name), str(kind_name)))
    if kind is None:
        given = "no model_type" if kind_name is None else f"model_type = {printable(repr(kind_name), 80)}"
        raise Misconfigured(f"{WHAT} with {given}: known are {', '.join(KINDS)}; or give the model's widths as a job")
    reading = Reading(WHAT, values)
    model = _model(reading, kind, str(kind_name))
    if nested:
        reading.say("assumed: the text model alone is trained; what else the file describes is left out")
    if "quantization_config" in values:
        reading.say("quantization_config says how weights are stored; the precision of training is --precision's")
    return ForeignJob(what=WHAT, tables={"model": model}, notes=reading.notes(NEUTRAL))


def _model(reading: Reading, kind: ModelKind, name: str) -> dict[str, Any]:
    heads = reading.needed("num_attention_heads", "n_head", "n_heads")
    qkv = reading.truth("attention_bias", "qkv_bias", default=kind.bias in ("qkv", "all"))
    block = reading.truth("mlp_bias", "use_bias", default=kind.bias == "all")
    model: dict[str, Any] = {
        "name": name,
        "layers": reading.needed("num_hidden_layers", "n_layer", "n_layers"),
        "hidden": reading.needed("hidden_size", "n_embd", "d_model"),
        "heads": heads,
        "vocab": reading.needed("vocab_size"),
        "gated": kind.gated,
        "tied": reading.truth("tie_word_embeddings", default=kind.tied),
        "qk_norm": reading.truth("use_qk_norm", default=kind.qk_norm),
        "norms": kind.norms,
        "rotary": kind.rotary,
        "bias": "all" if block else "qkv" if qkv else "none",
        "dropout": reading.number("resid_pdrop", "residual_dropout", "hidden_dropout", "dropout") > 0,
        "experts": _experts(reading, name),
        "ffn": _dense_width(reading, name),
        "mtp": reading.whole("num_nextn_predict_layers", "num_mtp_layers", least=0) or 0,
    }
    if reading.values.get("kv_lora_rank") is not None:
        model["mla"] = _latent(reading)
        reading.take("num_key_value_heads")  # all of them, as each head has its own keys
        reading.take("head_dim")  # of the rotary part alone
    else:
        model["head_dim"] = reading.whole("head_dim")
        keys = 1 if reading.truth("multi_query") else None
        model["kv_heads"] = reading.whole("num_key_value_heads", "num_kv_heads", "n_head_kv") or keys
    model |= _window(reading, kind, int(model["layers"]))
    if model["mtp"]:
        reading.say(f"assumed: {model['mtp']} MTP modules are trained; --set model.mtp=0 leaves them out")
    return {field: value for field, value in model.items() if value is not None}


def _latent(reading: Reading) -> dict[str, int]:
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = {name: reading.needed(name) for name in widths}
    rank = reading.whole("q_lora_rank", least=0)
    return found | ({"q_lora_rank": rank} if rank else {})


def _dense_width(reading: Reading, name: str) -> int | None:
    if name == "llama4_text":
        return reading.whole("intermediate_size_mlp")
    if name == "grok-1":
        return reading.whole("intermediate_size")
    return reading.whole("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")


def _experts(reading: Reading, name: str) -> dict[str, int] | None:
    count = reading.whole("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", least=0)
    if not count:
        return None
    width = reading.needed("moe_intermediate_size", "intermediate_size")
    every = reading.whole("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    shared = reading.whole("n_shared_experts", "moe_num_shared_experts", least=0) or 0
    shared_width = reading.whole("shared_expert_intermediate_size", least=0) or 0
    if shared_width % width:
        raise reading.wrong(("shared_expert_intermediate_size",), shared_width, f"give a multiple of {width}")
    if name == "llama4_text":
        shared = 1
    if only_dense := reading.values.get("mlp_only_layers"):
        raise reading.wrong(("mlp_only_layers",), only_dense, "only the first layers can be dense; give [] or a job")
    return {
        "count": count,
        "per_token": reading.needed("num_experts_per_tok", "moe_k", "num_experts_per_token"),
        "width": width,
        "shared": shared + shared_width // width,
        "every": every or 1,
        "first_dense": reading.whole("first_k_dense_replace", "moe_layer_start_index", least=0) or 0,
    }


def _window(reading: Reading, kind: ModelKind, layers: int) -> dict[str, int]:
    """Return a model's sliding-window fields `window` and `full_every`; {} if every layer attends to all tokens."""
    types = reading.take("layer_types")
    width = reading.whole("sliding_window", "attention_chunk_size", least=0)
    pattern = reading.whole("sliding_window_pattern", "_sliding_window_pattern") or kind.full_every
    if isinstance(types, list):
        if other := [each for each in types if str(each) not in ATTENTION]:
            raise reading.wrong(
                ("layer_types",), other[0], f"only layers of {', '.join(sorted(ATTENTION))} can be planned"
            )
        full = types.count("full_attention")
        if not width or full >= layers:
            return {}
        every = max(round(layers / full), 1) if full else None
        if every is not None and layers // every != full:
            reading.say(
                f"assumed: one layer in {every} looks back to the beginning; layer_types has {full} of {layers}"
            )
        return {"window": width} | ({"full_every": every} if every else {})
    used = kind.windows or kind.full_every is not None
    if "use_sliding_window" in reading.values:
        used = reading.truth("use_sliding_window")
    if not width or not used:
        return {}
    return {"window": width} | ({"full_every": pattern} if pattern else {})
