"""Jobs of other software: what is read of them, what must be added, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.foreign.arguments import find_arguments
from counterpoint.plan.job.foreign.huggingface import read_config
from counterpoint.plan.job.foreign.megatron import read_megatron
from counterpoint.plan.job.foreign.read_job_file import read_job_file
from counterpoint.plan.job.foreign.torchtitan import FLAVORS, read_torchtitan
from counterpoint.plan.job.job import TABLES, Job, job_toml, parse_job, read_tables
from counterpoint.plan.job.model import Model, find_model
from counterpoint.plan.job.what_if import build_job

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
SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=4
GPUS_PER_NODE=8
NNODES=${NNODES:-"2"}
WORLD=$((GPUS_PER_NODE * $NNODES))
TP=${TP:-2}    # of matrices
LAYERS=32
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_port ${PORT}"
MODEL_ARGS=(
    --num-layers $LAYERS   # --num-layers 99 in a comment
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --seq-length 8192
    --attention-dropout 0.0 --hidden-dropout 0.0
    "--vocab-size 128256" --mystery-flag 7
)
if [ -n "$FP8" ]; then
    echo "--num-layers 64 would be too much"
fi
GLOBAL=$((16*4))
torchrun ${DISTRIBUTED_ARGS} pretrain_gpt.py ${MODEL_ARGS[@]} \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 \
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --bf16 --use-flash-attn \
    --micro-batch-size 2 --global-batch-size $GLOBAL --recompute-granularity full --recompute-method uniform
"""
TITAN = """
[job]
description = "facts of a job"
[model]
name = "llama3"
flavor = "70B"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
"""
OLD_TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
seq_len = 4096
data_parallel_degree = 16
compile = false
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "none"
[float8]
enable_float8_linear = true
"""


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


def test_what_a_config_was_read_for_is_said() -> None:
    """What was read, what is of no matter, and what is unknown: each name once."""
    notes = read_config(LLAMA).notes
    assert "hidden_size" in notes[0]
    assert any("neither time nor memory" in note and "rope_theta" in note and "torch_dtype" in note for note in notes)
    assert notes[-1] == "not modelled, so not in the prediction: mystery"


def test_a_quantized_config_says_nothing_of_training() -> None:
    """fp8 weights are not fp8 training; MTP can be left out."""
    notes = read_config(V3).notes
    assert any("quantization_config says how weights are stored" in note for note in notes)
    assert any("--set model.mtp=0" in note for note in notes)


def test_a_config_needs_flags_and_the_error_lists_them(written: Any) -> None:
    """All at once, in one line; with them it is a job."""
    path = written(LLAMA, "config.json")
    with pytest.raises(Misconfigured) as raised:
        read_job_file(path, {})
    assert str(raised.value).endswith(
        "config.json: not all that a job needs is in config.json of Hugging Face: add --set training.sequence=TOKENS "
        "--global-batch SAMPLES --gpu NAME --network NAME --nodes N (or --set parallel.dp=N)"
    )
    with pytest.raises(Misconfigured, match=r"add --network NAME$"):
        read_job_file(path, {"training.sequence": "8192", "global_batch": "64", "nodes": "2", "gpu": "H100"})
    with pytest.raises(Misconfigured, match=r"nodes = 1e9: give a number of nodes"):
        job_of(path, training__sequence="8192", global_batch="64", nodes="1e9", **MACHINES)
    found = job_of(path, training__sequence="8192", global_batch="64", nodes="2", parallel__tp="4", **MACHINES)
    assert (found.parallel.dp, found.parallel.tp, found.cluster.num_gpus, found.training.global_batch) == (4, 4, 16, 64)


def test_a_script_of_megatron_is_read_without_running_it(written: Any) -> None:
    """Variables with defaults, arithmetic, quoted arguments, comments; the launcher says how many GPUs there are."""
    path = written(SCRIPT, "train.sh")
    found = job_of(path, **MACHINES)
    known = find_model("llama3-8b")
    assert (found.model.layers, found.model.key_heads, found.model.ffn_width) == (32, 8, known.ffn_width)
    assert (found.model.vocab, found.model.tied, found.model.dropout, found.model.biased) == (
        128256,
        False,
        False,
        "none",
    )
    assert (found.parallel.tp, found.parallel.pp, found.parallel.virtual, found.parallel.dp) == (2, 2, 4, 4)
    assert (found.parallel.schedule, found.parallel.sequence, found.parallel.zero) == ("interleaved", True, 1)
    assert (found.training.global_batch, found.training.micro_batch, found.training.sequence) == (64, 2, 8192)
    assert (found.training.precision, found.training.recompute, found.training.flash_attention) == (
        "bf16",
        "full",
        True,
    )
    notes = read_megatron(SCRIPT).notes
    assert "not modelled, so not in the prediction: --mystery-flag" in notes


def test_a_script_runs_nothing(tmp_path: Path, written: Any) -> None:
    """Neither commands in its values nor those in backticks."""
    mark = tmp_path / "ran"
    text = f"X=$(touch {mark})\nY=`touch {mark}`\n--num-layers $X --hidden-size 64 --num-attention-heads `touch {mark}`"
    with pytest.raises(Misconfigured):
        read_job_file(written(text, "evil.sh"), {})
    assert not mark.exists()


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
    printed = """
[rank0]: ------------------------ arguments ------------------------
[rank0]:   add_bias_linear ................................. False
[rank0]:   attention_dropout ............................... 0.0
[rank0]:   bf16 ............................................ True
[rank0]:   fp16 ............................................ False
[rank0]:   global_batch_size ............................... 16
[rank0]:   group_query_attention ........................... True
[rank0]:   hidden_dropout .................................. 0.0
[rank0]:   hidden_size ..................................... 256
[rank0]:   micro_batch_size ................................ 1
[rank0]:   moe_ffn_hidden_size ............................. 128
[rank0]:   moe_router_topk ................................. 2
[rank0]:   num_attention_heads ............................. 8
[rank0]:   num_experts ..................................... 8
[rank0]:   num_layers ...................................... 4
[rank0]:   num_query_groups ................................ 2
[rank0]:   q_lora_rank ..................................... None
[rank0]:   swiglu .......................................... True
[rank0]:   untie_embeddings_and_output_weights ............. False
"""
    first, second = read_megatron(yaml).tables, read_megatron(printed).tables
    assert first == second
    assert first["model"]["experts"] == {
        "count": 8, "per_token": 2, "width": 128, "shared": 0, "every": 1, "first_dense": 0,
    }  # fmt: skip
    assert first["model"]["kv_heads"] == 2


def test_deepseek_in_arguments_of_megatron() -> None:
    """Latent attention, first dense layers, a shared expert, MTP, FSDP."""
    text = """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048 --mtp-num-layers 1 --untie-embeddings-and-output-weights
    --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --vocab-size 129280
    --make-vocab-size-divisible-by 1 --window-size 127,0 --window-attn-skip-freq 2 --bf16
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
        ("--num-layers 2 --num-layers 4 --hidden-size 8 --num-attention-heads 2", "--num-layers has several values"),
        ("--num-layers $N --hidden-size 8 --num-attention-heads 2", "--num-layers $N in arguments of Megatron-LM: the"),
        ("--num-layers 2", "without --hidden-size: add it"),
        ("--num-layers two --hidden-size 8 --num-attention-heads 2", "--num-layers = 'two'"),
        ("--num-layers -2 --hidden-size 8 --num-attention-heads 2", "--num-layers = -2"),
        ("--num-layers 2 --hybrid-layer-pattern M*", "--hybrid-layer-pattern in arguments of Megatron-LM: Mamba"),
        (
            "--num-layers 9 --hidden-size 8 --num-attention-heads 2 --pipeline-model-parallel-size 4 "
            "--decoder-first-pipeline-num-layers 1",
            "give numbers that leave as many layers for every other stage",
        ),
        (
            "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --num-experts 4 --moe-layer-freq [0]*1+[1]*9",
            "--moe-layer-freq = '[0]*1+[1]*9'",
        ),
        ("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --optimizer muon", "allowed are adam and sgd"),
    ],
)
def test_arguments_that_cannot_be_planned_are_named(text: str, said: str) -> None:
    """With what came and what to do."""
    with pytest.raises(Misconfigured) as raised:
        read_megatron(text)
    assert said in str(raised.value)


def test_recomputation_is_what_the_file_says() -> None:
    """Modules, units of layers, some of the layers, every second one; uneven stages."""
    small = "--num-layers 10 --hidden-size 64 --num-attention-heads 4 --bf16"

    def training(more: str) -> dict[str, Any]:
        found = read_megatron(f"{small} {more}").tables["training"]
        return {name: value for name, value in found.items() if name.startswith("recompute")}

    full = "--recompute-granularity full"
    assert training(f"{full} --recompute-method uniform --recompute-num-layers 1") == {"recompute": "full"}
    assert training(f"{full} --recompute-method block --recompute-num-layers 3") == {
        "recompute": "full", "recompute_method": "block", "recompute_num_layers": 3,
    }  # fmt: skip
    assert training("--recompute-activations") == {"recompute": "selective"}
    some = "--recompute-granularity selective --recompute-modules mlp moe mla_up_proj layernorm"
    assert training(some) == {"recompute": "selective", "recompute_modules": ["layernorm", "mlp", "moe"]}
    assert any("mla_up_proj is kept" in note for note in read_megatron(f"{small} {some}").notes)
    stages = (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
    )
    assert read_megatron(f"{small} {stages}").tables["parallel"]["stage_layers"] == [1, 4, 4, 1]
    for option, count in (("2", 16), ("op", 12), ("40", None)):
        tables = {"model": {"flavor": "8B"}, "activation_checkpoint": {"selective_ac_option": option}}
        assert read_torchtitan(tables).tables["training"].get("recompute_num_layers") == count


def test_whole_experts_are_read() -> None:
    """Experts that tp does not cut, in arguments of Megatron-LM and, as its default, in jobs of torchtitan."""
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --sequence-parallel"
    text = f"{small} --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size"
    assert read_megatron(f"{text} 1").tables["parallel"]["expert_tp"] == 1
    assert "expert_tp" not in read_megatron(f"{text} 4").tables["parallel"]
    with pytest.raises(Misconfigured, match=r"--expert-tensor-parallel-size = 2 .*allowed are 1 and 4"):
        read_megatron(f"{text} 2")
    degrees = {"tensor_parallel_degree": 4, "expert_parallel_degree": 8, "data_parallel_shard_degree": 2}
    tables = {"model": {"name": "qwen3", "flavor": "30B-A3B"}, "parallelism": degrees}
    assert read_torchtitan(tables).tables["parallel"]["expert_tp"] == 1


def test_fp8_is_scaled_as_the_file_says() -> None:
    """By a recipe of Transformer Engine or a converter of torchtitan; CUDA graphs are a choice, too."""
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --bf16"
    training = read_megatron(f"{small} --fp8-format hybrid --fp8-recipe blockwise --cuda-graph-impl local").tables
    assert training["training"].items() >= {"precision": "fp8", "fp8_scaling": "blockwise", "cuda_graphs": True}.items()
    assert read_megatron(small).tables["training"].items() >= {"precision": "bf16", "cuda_graphs": False}.items()
    for converter, scaling in (("quantize.linear.float8", "tensorwise"), ("quantize.linear.mx", "mxfp8")):
        tables = {"model": {"flavor": "8B", "converters": [converter]}, "training": {"seq_len": 128}}
        assert read_torchtitan(tables).tables["training"]["fp8_scaling"] == scaling
    rows = {"model": {"flavor": "8B", "converters": ["float8"]}, "float8": {"recipe_name": "rowwise"}}
    assert read_torchtitan(rows).tables["training"]["fp8_scaling"] == "rowwise"


def test_every_branch_of_a_script_counts() -> None:
    """Sizes chosen by a condition are several values; the error lists them."""
    text = "if a; then\n  L=24\nelse\n  L=48\nfi\n--num-layers ${L} --hidden-size 64 --num-attention-heads 4"
    with pytest.raises(Misconfigured, match=r"--num-layers has several values .*: 24, 48; leave one of them"):
        read_megatron(text)


def test_variables_in_variables_end() -> None:
    """A variable that doubles itself does not fill memory."""
    doubling = "".join(f"V{n}=$V{n + 1}$V{n + 1}\n" for n in range(60)) + "V60=x\n"
    assert find_arguments(f"{doubling}--num-layers $V0{'$V1' * 4000} --hidden-size 8")


def test_a_job_of_torchtitan_leaves_the_gpus_open(written: Any) -> None:
    """Its batch follows from the replicas, and these from the nodes."""
    path = written(TITAN, "llama3_70b.toml")
    with pytest.raises(Misconfigured, match=r"a job of torchtitan: add --gpu NAME --network NAME --nodes N \(or"):
        read_job_file(path, {})
    found = job_of(path, nodes="8", **MACHINES)
    assert (found.model, found.parallel.dp, found.parallel.tp) == (find_model("llama3-70b"), 8, 8)
    assert (found.training.global_batch, found.training.micro_batch, found.training.recompute) == (16, 2, "full")
    assert (found.parallel.zero, found.parallel.reshard_after_forward, found.training.fused_kernels) == (3, True, True)


def test_old_names_of_torchtitan_are_read(written: Any) -> None:
    """`batch_size`, degrees in [training] and [experimental], [float8]."""
    found = job_of(written(OLD_TITAN, "old.toml"), **MACHINES)
    assert (found.parallel.dp, found.training.micro_batch, found.training.global_batch) == (16, 2, 32)
    assert (found.training.precision, found.training.recompute, found.training.fused_kernels) == ("fp8", "none", False)


def test_replicas_of_shards(written: Any) -> None:
    """HSDP: the file says how many replicas there are, the nodes how many ranks share a set of shards."""
    text = TITAN.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 1\ndata_parallel_replicate_degree = 4")
    found = job_of(written(text, "hsdp.toml"), nodes="2", **MACHINES)
    assert (found.parallel.dp, found.parallel.shard) == (16, 4)


def test_every_flavor_of_torchtitan_is_a_model() -> None:
    """Those with a name are known."""
    for family, flavors in FLAVORS.items():
        for flavor in flavors:
            tables = read_torchtitan(
                {"model": {"name": family, "flavor": flavor}, "training": {"seq_len": 4096}}
            ).tables
            given = {"training": {"sequence": 4096, "global_batch": 8}, "parallel": {}, "cluster": MACHINES}
            assert parse_job(tables | given).model.layers > 0, flavor


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"70B"', '"71B"', "model.flavor = '71B' in a job of torchtitan: known are 8B, 70B, 405B"),
        ('"llama3"', '"flux"', "model.name = 'flux'"),
        ('"AdamW"', '"Muon"', "allowed are Adam and AdamW"),
        ('"full"', '"memory_budget"', "activation_checkpoint.mode = 'memory_budget'"),
        ("seq_len = 8192", "seq_len = true", "training.seq_len = True"),
    ],
)
def test_what_torchtitan_has_and_the_planner_not(old: str, new: str, said: str, written: Any) -> None:
    """Value, name and what is allowed."""
    assert old in TITAN
    with pytest.raises(Misconfigured) as raised:
        read_job_file(written(TITAN.replace(old, new), "t.toml"), {})
    assert said in str(raised.value)


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
    """Which field, what came, what is allowed."""
    with pytest.raises(Misconfigured) as raised:
        read_config(LLAMA | change)
    assert said in str(raised.value)


@pytest.mark.parametrize("content", ["{", "{" * 100_000, '{"a": NaN}', "\x00", "--", "num_layers", "= 3"])
def test_a_hostile_file_is_an_error_in_one_line(content: str, written: Any) -> None:
    """Whatever it begins like."""
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
    """Whatever stands there: tables, or Misconfigured."""
    changed = config | {data.draw(st.sampled_from(sorted(config))): data.draw(JUNK)}
    try:
        found = read_config(changed)
    except Misconfigured:
        return
    assert found.notes


@given(st.text(alphabet="-=${}()'\"# \n0123abcNL_:.+*/", max_size=80))
def test_junk_in_arguments_is_an_error_in_words(text: str) -> None:
    """Whatever stands around the number of layers."""
    try:
        found = read_megatron(f"{text}\n--num-layers 4 --hidden-size 64 --num-attention-heads 4 {text}")
    except Misconfigured:
        return
    assert found.tables["model"]["layers"] == 4


@given(st.sampled_from(["model", "training", "parallelism", "activation_checkpoint", "compile", "optimizer"]), JUNK)
def test_junk_in_a_job_of_torchtitan_is_an_error_in_words(table: str, junk: object) -> None:
    """Whatever stands there: tables, or Misconfigured."""
    try:
        found = read_torchtitan({"training": {"seq_len": 128}, table: junk})
    except Misconfigured:
        return
    assert found.tables


@pytest.mark.parametrize("path", sorted(Path("examples/plan").glob("*.toml")), ids=lambda path: path.stem)
def test_a_job_written_as_toml_is_the_same_job(path: Path, written: Any) -> None:
    """To the last field; so is one with levels and a GPU of its own, and one that was changed."""
    nic = {} if path.stem == "llama3-8b-one-node" else {"nic_gbit": "200"}
    gpu = 'cluster.gpu={ name = "X", tflops = { bf16 = 9.0 }, sms = 9, memory_gib = 9, memory_gb_per_s = 9 }'
    for changes in ({}, nic, {"slow_rank": "1.5", "power_watts": "500"}, dict([gpu.split("=", 1)])):
        found = build_job(read_tables(path), changes)
        assert parse_job(read_tables(written(job_toml(found)))) == found
        assert ('gpu = "H' in job_toml(found)) == (found.cluster.gpu.name != "X")


def test_every_table_of_a_job_is_written(written: Any) -> None:
    """Also one whose fields all have their defaults, and one that nobody knew when this was written."""
    tables: dict[str, Any] = {
        "model": {"name": "deepseek-v3", "mtp": 0}, "training": {"sequence": 4096, "global_batch": 64},
        "parallel": {"dp": 8}, "cluster": MACHINES, "overlap": {"mechanism": "zero_sm", "dp": "nccl"},
        "compression": {"method": "topk"}, "ranks": {"slow": 1.5}, "run": {"tokens": 1e12},
    }  # fmt: skip
    assert set(tables) == set(TABLES)
    found = parse_job(tables)
    assert parse_job(read_tables(written(job_toml(found)))) == found


def test_our_own_file_is_read_as_it_is(written: Any) -> None:
    """Without notes, and with its own errors."""
    tables, notes = read_job_file(written('[model]\nname = "llama3-8b"\n', "own.toml"), {})
    assert (tables, notes) == ({"model": {"name": "llama3-8b"}}, ())
    with pytest.raises(Misconfigured, match="not TOML"):
        read_job_file(written("[model\n", "own.toml"), {})


def test_a_named_model_can_be_changed() -> None:
    """What is given beside its name; tables in it field by field."""
    tables = {"training": {"sequence": 4096, "global_batch": 1}, "cluster": MACHINES}
    found = parse_job(tables | {"model": {"name": "mixtral-8x7b", "experts": {"imbalance": 1.2}, "tied": True}}).model
    assert found.experts is not None
    assert (found.experts.count, found.experts.imbalance, found.tied, found.layers) == (8, 1.2, True, 32)
