"""Jobs of other software: what is read of them, what must be added, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.changes import build_job
from counterpoint.plan.job.foreign.huggingface import read_config
from counterpoint.plan.job.foreign.megatron import read_megatron
from counterpoint.plan.job.foreign.read_job_file import read_job_file
from counterpoint.plan.job.job import RECORDS, Job, job_toml, parse_job, read_tables
from counterpoint.plan.job.model import Model, find_model

MACHINES = {"gpu": "H100", "network": "h100-ndr-400"}
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "max_position_embeddings": 8192, "mystery": 3,
}  # fmt: skip
V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 8, "intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "use_sliding_window": False,
    "mlp_only_layers": [], "sliding_window": None,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262144,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip


def printed(arguments: dict[str, str]) -> str:
    """Spell arguments as a run of Megatron-LM prints them."""
    lines = [f"  {name} ".ljust(50, ".") + f" {value}" for name, value in arguments.items()]
    ends = [f"{' arguments ':-^59}", f"{' end of arguments ':-^59}"]
    return "\n".join(f"[rank0]: {line}" for line in (ends[0], *lines, ends[1]))


PRINTED = printed({
    "add_bias_linear": "False", "attention_backend": "AttnBackend.auto", "attention_dropout": "0.0", "bf16": "True",
    "data_parallel_size": "4", "ffn_hidden_size": "14336", "fp16": "False", "fp8": "None", "fp8_recipe": "delayed",
    "global_batch_size": "64", "gradient_accumulation_fusion": "True", "group_query_attention": "True",
    "hidden_dropout": "0.0", "hidden_size": "4096", "is_hybrid_model": "False", "kv_channels": "128", "lr": "0.0003",
    "micro_batch_size": "2", "mystery_flag": "7", "num_attention_heads": "32", "num_experts": "None",
    "num_layers": "32", "num_query_groups": "8", "overlap_grad_reduce": "True", "overlap_p2p_comm": "True",
    "padded_vocab_size": "128256", "pipeline_model_parallel_size": "2", "position_embedding_type": "rope",
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1", "seq_length": "8192",
    "sequence_parallel": "True", "swiglu": "True", "tensor_model_parallel_size": "2",
    "untie_embeddings_and_output_weights": "True", "use_distributed_optimizer": "True",
    "virtual_pipeline_model_parallel_size": "4", "world_size": "16",
})  # fmt: skip
SMALL = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\n"


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(content: str | dict[str, Any], name: str = "job") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        return path

    return write


def job_of(path: Path, **changes: str) -> Job:
    asked = {name.replace("__", "."): value for name, value in changes.items()}
    tables, _ = read_job_file(path, asked)
    return build_job(tables, asked)


def model_of(config: dict[str, Any]) -> Model:
    tables = {"training": {"sequence": 4096, "global_batch": 1}, "cluster": MACHINES}
    return parse_job(read_config(config).tables | tables).model


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"), (V3, "deepseek-v3"), (GPT_OSS, "gpt-oss-20b"), (QWEN3_MOE, "qwen3-30b-a3b"),
        (GEMMA3, "gemma3-27b"),
    ],
)  # fmt: skip
def test_a_config_of_hugging_face_is_the_model_that_has_the_name(config: dict[str, Any], name: str) -> None:
    """Every field that a prediction depends on; `bias` and others are the same said otherwise."""
    found, known = model_of(config), find_model(name)
    for field in ("layers", "hidden", "heads", "key_heads", "head_width", "value_width", "window", "full_every", "mla",
                  "qk_norm", "biased", "rotates", "norms", "gated", "vocab", "tied", "experts", "mtp"):  # fmt: skip
        assert getattr(found, field) == getattr(known, field), field
    if known.experts is None or known.experts.first_dense:
        assert found.ffn_width == known.ffn_width


def test_notes_say_what_a_config_was_read_for() -> None:
    notes = read_config(LLAMA).notes
    assert "hidden_size" in notes[0]
    assert any("neither time nor memory" in note and "rope_theta" in note and "torch_dtype" in note for note in notes)
    assert notes[-1] == "not modelled, so not in the prediction: mystery"
    # fp8 weights are not fp8 training; MTP can be left out
    notes = read_config(V3).notes
    assert any("quantization_config says how weights are stored" in note for note in notes)
    assert any("--set model.mtp=0" in note for note in notes)


def test_a_config_needs_flags_and_the_error_lists_them(written: Any) -> None:
    path = written(LLAMA, "config.json")
    with pytest.raises(Misconfigured) as raised:
        read_job_file(path, {})
    assert str(raised.value).endswith(
        "config.json: not all that a job needs is in config.json of Hugging Face: add --set training.sequence=TOKENS "
        "--set training.global_batch=SAMPLES --gpu NAME --network NAME --nodes N (or --set parallel.dp=N)"
    )
    with pytest.raises(Misconfigured, match=r"add --network NAME$"):
        read_job_file(path, {"training.sequence": "8192", "training.global_batch": "64", "nodes": "2", "gpu": "H100"})
    with pytest.raises(Misconfigured, match=r"nodes = 1e9: give a number of nodes"):
        job_of(path, training__sequence="8192", training__global_batch="64", nodes="1e9", **MACHINES)
    given = {"training__sequence": "8192", "training__global_batch": "64", "nodes": "2", "parallel__tp": "4"}
    found = job_of(path, **given, **MACHINES)
    assert (found.parallel.dp, found.parallel.tp, found.cluster.num_gpus, found.training.global_batch) == (4, 4, 16, 64)


def test_printed_arguments_of_megatron_are_a_job(written: Any) -> None:
    found, known = job_of(written(PRINTED, "run.log"), **MACHINES), find_model("llama3-8b")
    model, parallel, training = found.model, found.parallel, found.training
    assert (model.layers, model.key_heads, model.ffn_width, model.head_dim) == (32, 8, known.ffn_width, 128)
    assert (model.vocab, model.tied, model.dropout, model.biased, model.rotary) == (128256, False, False, "none", True)
    assert (parallel.tp, parallel.pp, parallel.virtual, parallel.dp) == (2, 2, 4, 4)
    assert (parallel.schedule, parallel.sequence, parallel.zero) == ("interleaved", True, 1)
    assert (parallel.overlap_dp, parallel.overlap_pp) == (True, True)
    assert (training.global_batch, training.micro_batch, training.sequence) == (64, 2, 8192)
    assert (training.precision, training.recompute, training.flash_attention) == ("bf16", "full", True)
    assert (training.fused_accumulation, training.grad_bytes) == (True, 4)
    notes = read_megatron(PRINTED).notes
    assert "not modelled, so not in the prediction: mystery_flag" in notes
    assert "left out, as it changes neither time nor memory: lr" in notes


def test_a_script_is_refused_with_what_to_give(written: Any) -> None:
    script = written("TP=${TP:-2}\ntorchrun pretrain_gpt.py --num-layers $LAYERS --hidden-size 64\n", "train.sh")
    with pytest.raises(Misconfigured, match=r"train\.sh: a script .*: give the list of arguments that its run prints"):
        read_job_file(script, {})


def test_yaml_and_printed_arguments_mean_the_same() -> None:
    """Names with underscores; None and False are as if they were not there."""
    yaml = """
model:
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  num_query_groups: 2
  num_moe_experts: 8
  moe_router_topk: 2
  moe_ffn_hidden_size: 128
  gated_linear_unit: true
  add_bias_linear: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
train:
  global_batch_size: 16
  micro_batch_size: 1
precision: bf16-mixed
"""
    arguments = {
        "add_bias_linear": "False", "attention_dropout": "0.0", "bf16": "True", "fp16": "False",
        "global_batch_size": "16", "group_query_attention": "True", "hidden_dropout": "0.0", "hidden_size": "256",
        "micro_batch_size": "1", "moe_ffn_hidden_size": "128", "moe_router_topk": "2", "num_attention_heads": "8",
        "num_experts": "8", "num_layers": "4", "num_query_groups": "2", "q_lora_rank": "None", "swiglu": "True",
        "untie_embeddings_and_output_weights": "False",
    }  # fmt: skip
    first, second = read_megatron(yaml).tables, read_megatron(printed(arguments)).tables
    assert first == second
    assert first["model"]["experts"] == {
        "count": 8, "per_token": 2, "width": 128, "shared": 0, "every": 1, "first_dense": 0,
    }  # fmt: skip
    assert first["model"]["kv_heads"] == 2


def test_deepseek_in_arguments_of_megatron() -> None:
    """Latent attention, first dense layers, a shared expert, MTP, FSDP."""
    text = """num_layers: 61\nhidden_size: 7168\nffn_hidden_size: 18432\nnum_attention_heads: 128\nswiglu: true
multi_latent_attention: true\nq_lora_rank: 1536\nkv_lora_rank: 512\nqk_head_dim: 128\nqk_pos_emb_head_dim: 64
v_head_dim: 128\nnum_experts: 256\nmoe_layer_freq: ([0]*3+[1]*58)\nmoe_ffn_hidden_size: 2048\nmoe_router_topk: 8
moe_shared_expert_intermediate_size: 2048\nmtp_num_layers: 1\nuntie_embeddings_and_output_weights: true
add_bias_linear: false\nposition_embedding_type: rope\nhidden_dropout: 0\nattention_dropout: 0
use_megatron_fsdp: true\ndata_parallel_sharding_strategy: optim_grads_params\nvocab_size: 129280
make_vocab_size_divisible_by: 1\nwindow_size: (127, 0)\nwindow_attn_skip_freq: 2\nbf16: true
"""
    found = read_megatron(text).tables
    known = find_model("deepseek-v3")
    tables = found | {"cluster": MACHINES, "training": {"sequence": 4096, "global_batch": 1}, "parallel": {}}
    model = parse_job(tables).model
    assert (model.mla, model.experts, model.mtp, model.vocab) == (known.mla, known.experts, known.mtp, known.vocab)
    assert (model.window, model.full_every, found["parallel"]["zero"]) == (128, 2, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{SMALL}num_layers: 4", "num_layers = ('2', '4') in arguments of Megatron-LM: give a whole number"),
        ("num_layers: 2", "without hidden_size: add it"),
        (SMALL.replace("2", "two"), "num_layers = 'two'"),
        (SMALL.replace("2", "-2"), "num_layers = -2"),
        (f"{SMALL}hybrid_layer_pattern: M*", "hybrid_layer_pattern in arguments of Megatron-LM: Mamba"),
        (
            f"{SMALL}pipeline_model_parallel_size: 4\ndecoder_first_pipeline_num_layers: 1",
            "give numbers that leave as many layers for every other stage",
        ),
        (f"{SMALL}num_experts: 4\nmoe_layer_freq: [0]*1+[1]*9", "moe_layer_freq = '[0]*1+[1]*9'"),
        (f"{SMALL}optimizer: muon", "allowed are adam, sgd"),
        (f"{SMALL}fp8: hybrid\nfp8_recipe: magic", "fp8_recipe = 'magic'"),
        (f"{SMALL}swiglu: true\nsquared_relu: true", "squared_relu with a gated unit"),
        (f"{SMALL}use_megatron_fsdp: true\ndata_parallel_sharding_strategy: all", "allowed are no_shard, optim"),
    ],
)
def test_arguments_that_cannot_be_planned_are_named(text: str, said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        read_megatron(text)
    assert said in str(raised.value)


def test_recomputation_is_what_the_file_says() -> None:
    """Modules, units of layers, some of the layers; uneven stages."""
    small = SMALL.replace("2", "10", 1)

    def training(more: str) -> dict[str, Any]:
        found = read_megatron(f"{small}{more}").tables["training"]
        return {name: value for name, value in found.items() if name.startswith("recompute")}

    full = "recompute_granularity: full\nrecompute_method:"
    assert training(f"{full} uniform\nrecompute_num_layers: 1") == {"recompute": "full"}
    assert training(f"{full} block\nrecompute_num_layers: 3") == {
        "recompute": "full", "recompute_method": "block", "recompute_num_layers": 3,
    }  # fmt: skip
    some = "recompute_granularity: selective\nrecompute_modules: ['mlp', 'moe', 'mla_up_proj', 'layernorm']"
    assert training(some) == {"recompute": "selective", "recompute_modules": ["layernorm", "mlp", "moe"]}
    assert any("mla_up_proj is kept" in note for note in read_megatron(f"{small}{some}").notes)
    stages = (
        "pipeline_model_parallel_size: 4\ndecoder_first_pipeline_num_layers: 1\ndecoder_last_pipeline_num_layers: 1"
    )
    assert read_megatron(f"{small}{stages}").tables["parallel"]["stage_layers"] == [1, 4, 4, 1]


@pytest.mark.parametrize(
    ("more", "share"),
    [("", 1.0), ("\noptimizer_offload_fraction: 0.5", 0.5), ("\noptimizer_offload_fraction: 0.0", 0.0)],
)
def test_the_part_of_the_optimizer_on_the_host_is_read(more: str, share: float) -> None:
    """All of it, unless the file says how much; a fraction without the switch does nothing."""
    assert read_megatron(f"{SMALL}optimizer_cpu_offload: true{more}").tables["training"]["offload_optimizer"] == share
    assert "offload_optimizer" not in read_megatron(f"{SMALL}{more}").tables["training"]


def test_experts_and_fp8_are_read_as_the_file_says() -> None:
    text = (
        f"{SMALL}num_experts: 8\nsequence_parallel: true\ntensor_model_parallel_size: 4\nexpert_tensor_parallel_size:"
    )
    assert read_megatron(f"{text} 1").tables["parallel"]["expert_tp"] == 1
    assert "expert_tp" not in read_megatron(f"{text} 4").tables["parallel"]
    with pytest.raises(Misconfigured, match=r"expert_tensor_parallel_size = 2 .*allowed are 1 and 4"):
        read_megatron(f"{text} 2")
    # by a recipe of Transformer Engine; CUDA graphs are a choice, too
    small = f"{SMALL}bf16: true\n"
    training = read_megatron(f"{small}fp8: hybrid\nfp8_recipe: blockwise\ncuda_graph_impl: local").tables["training"]
    assert training.items() >= {"precision": "fp8", "fp8_scaling": "blockwise", "cuda_graphs": True}.items()
    assert read_megatron(small).tables["training"].items() >= {"precision": "bf16", "cuda_graphs": False}.items()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba2"}, "model_type = 'mamba2': known are llama"),
        ({"model_type": None}, "config.json of Hugging Face with no model_type"),
        (
            {"num_hidden_layers": "many"},
            "num_hidden_layers = 'many' in config.json of Hugging Face: give a whole number",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_hidden_layers": None}, "without num_hidden_layers: add it"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types = "),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [3]}, "mlp_only_layers = [3]"),
    ],
)
def test_a_config_that_cannot_be_planned(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        read_config(LLAMA | change)
    assert said in str(raised.value)


@pytest.mark.parametrize("content", ["{", "{" * 100_000, '{"a": NaN}', "\x00", "--", "num_layers", "= 3"])
def test_a_hostile_file_is_an_error_in_one_line(content: str, written: Any) -> None:
    with pytest.raises(Misconfigured) as raised:
        read_job_file(written(content), {})
    assert "\n" not in str(raised.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([LLAMA, V3, GPT_OSS, GEMMA3, QWEN3_MOE]), st.data())
def test_junk_in_a_config_is_an_error_in_words(config: dict[str, Any], data: st.DataObject) -> None:
    changed = config | {data.draw(st.sampled_from(sorted(config))): data.draw(JUNK)}
    try:
        found = read_config(changed)
    except Misconfigured:
        return
    assert found.notes


@given(st.text(alphabet="-=[]()'\"# \n0123abcNL_:.+*/", max_size=80), st.sampled_from([PRINTED, SMALL]))
def test_junk_in_arguments_is_an_error_in_words(text: str, arguments: str) -> None:
    try:
        found = read_megatron(f"{text}\n{arguments}\n{text}")
    except Misconfigured:
        return
    assert found.tables["model"]["heads"] in (4, 32)


@pytest.mark.parametrize("path", sorted(Path("examples/plan").glob("*.toml")), ids=lambda path: path.stem)
def test_a_job_written_as_toml_is_the_same_job(path: Path, written: Any) -> None:
    """To the last field; so is one with levels and a GPU of its own, and one that was changed."""
    nic = {} if path.stem == "llama3-8b-one-node" else {"cluster.nic_gbit": "200"}
    gpu = 'cluster.gpu={ name = "X", tflops = { bf16 = 9.0 }, sms = 9, memory_gib = 9, memory_gb_per_s = 9 }'
    for changes in ({}, nic, {"ranks.slow": "1.5", "cluster.power_watts": "500"}, dict([gpu.split("=", 1)])):
        found = build_job(read_tables(path), changes)
        assert parse_job(read_tables(written(job_toml(found)))) == found
        assert ('gpu = "H' in job_toml(found)) == (found.cluster.gpu.name != "X")


def test_every_table_of_a_job_is_written(written: Any) -> None:
    """Also one whose fields all have their defaults, and one that nobody knew when this was written."""
    tables: dict[str, Any] = {
        "model": {"name": "deepseek-v3", "mtp": 0}, "training": {"sequence": 4096, "global_batch": 64},
        "parallel": {"dp": 8}, "cluster": MACHINES, "overlap": {"mechanism": "zero_sm", "dp": "nccl"},
        "compression": {"method": "topk"}, "ranks": {"slow": 1.5}, "run": {"tokens": 1e12},
        "software": {"name": "FSDP2", "version": "2.11"},
    }  # fmt: skip
    assert set(tables) == set(RECORDS)
    found = parse_job(tables)
    assert parse_job(read_tables(written(job_toml(found)))) == found


def test_our_own_file_is_read_as_it_is(written: Any) -> None:
    tables, notes = read_job_file(written('[model]\nname = "llama3-8b"\n', "own.toml"), {})
    assert (tables, notes) == ({"model": {"name": "llama3-8b"}}, ())
    with pytest.raises(Misconfigured, match="not TOML"):
        read_job_file(written("[model\n", "own.toml"), {})


def test_a_named_model_can_be_changed() -> None:
    tables = {"training": {"sequence": 4096, "global_batch": 1}, "cluster": MACHINES}
    found = parse_job(tables | {"model": {"name": "mixtral-8x7b", "experts": {"imbalance": 1.2}, "tied": True}}).model
    assert found.experts is not None
    assert (found.experts.count, found.experts.imbalance, found.tied, found.layers) == (8, 1.2, True, 32)
