"""Read a job of torchtitan as TOML, which it was until February 2026, with the names that it has had since 2024.

Defaults are those of torchtitan/config/job_config.py. How many GPUs there are is no part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.foreign.reading import ForeignJob, Reading

WHAT = "a job of torchtitan"
DEBUG = {"layers": 6, "hidden": 256, "heads": 16, "vocab": 2048, "gated": True}
FLAVORS: dict[str, dict[str, dict[str, Any]]] = {  # torchtitan/models/*/__init__.py; widths as far as they differ
    "llama3": {
        "8B": {"name": "llama3-8b"}, "70B": {"name": "llama3-70b"}, "405B": {"name": "llama3-405b"},
        "debugmodel": {**DEBUG, "ffn": 768},
    },
    "llama4": {
        "17bx16e": {"name": "llama4-scout", "qk_norm": False}, "17bx128e": {"name": "llama4-maverick"},
    },
    "deepseek_v3": {
        "16B": {"name": "deepseek-v2-lite"}, "236B": {"name": "deepseek-v2"}, "671B": {"name": "deepseek-v3", "mtp": 0},
    },
    "qwen3": {
        **{size: {"name": f"qwen3-{size.lower()}"} for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
        "30B-A3B": {"name": "qwen3-30b-a3b"}, "235B-A22B": {"name": "qwen3-235b-a22b"},
    },
    "gpt_oss": {"20b": {"name": "gpt-oss-20b"}, "120b": {"name": "gpt-oss-120b"}},
}  # fmt: skip
VARIANT = re.compile(r"_(flex|varlen|irope)(_attn)?$")  # flavors that only attend by another kernel
SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zero_bubble", "loopedbfs": "gpipe", "dualpipev": "zero_bubble",
}  # fmt: skip
NEUTRAL = re.compile(
    r"""(job|profiling|metrics|lr_scheduler|checkpoint|comm|validation|experimental\.custom.*|debug|memory_estimation
    |fault_tolerance)(\..*)?
    |optimizer\.(lr|eps|beta\d|weight_decay|implementation|fused|foreach)
    |training\.(steps|dataset|dataset_path|max_norm|warmup_steps|gc_freq|gc_debug|seed|deterministic|dataloader\..*)
    |model\.(tokenizer_path|hf_assets_path|norm_type|print_after_conversion|tokenizer_type)
    |compile\.backend|.*\.filter_fqns|.*\.emulate|.*early_stop|.*preserve_rng_state|.*determinism_check""",
    re.VERBOSE,
)
DEGREES = ("parallelism", "experimental", "training")  # tables in which degrees have been


def is_torchtitan(tables: Mapping[str, Any]) -> bool:
    """Return whether TOML tables are a job of torchtitan: they have a table or a field that only these have."""
    model, training = tables.get("model"), tables.get("training")
    flavored = isinstance(model, Mapping) and "flavor" in model
    titled = isinstance(training, Mapping) and bool({"seq_len", "local_batch_size"} & training.keys())
    return "parallelism" in tables or flavored or titled


def read_torchtitan(tables: Mapping[str, Any]) -> ForeignJob:
    """Return the job of torchtitan's tables, as far as they say it."""
    reading = Reading(WHAT, dict(_flat(tables)))
    model = _model(reading)
    parallel, replicas = _parallel(reading)
    pp = parallel["pp"]
    samples = reading.whole("training.local_batch_size", "training.batch_size") or 8
    batch = reading.whole("training.global_batch_size", least=-1)
    one = reading.whole("parallelism.pipeline_parallel_microbatch_size") or 1
    if batch in (None, -1):
        batch = None
    training = {
        "sequence": reading.whole("training.seq_len") or 2048,
        "micro_batch": one if pp > 1 else samples,
        "fused_kernels": _compiles(reading),
        **_precision(reading),
        **_recomputation(reading),
    }
    if batch is not None:
        training["global_batch"] = batch
    else:
        reading.say(f"assumed: the global batch is {samples} samples for each replica, without accumulation")
    optimizer = reading.word("optimizer.name") or "AdamW"
    if not optimizer.lower().startswith("adam"):
        raise reading.wrong(("optimizer.name",), optimizer, "allowed are Adam and AdamW")
    tables_of_job = {"model": model, "training": training, "parallel": parallel}
    return ForeignJob(
        what=WHAT, tables=tables_of_job, notes=reading.notes(NEUTRAL),
        per_replica=samples if batch is None else None, replicas=replicas,
    )  # fmt: skip


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _model(reading: Reading) -> dict[str, Any]:
    family = reading.word("model.name") or "llama3"
    flavor = reading.word("model.flavor") or "debugmodel"
    if family not in FLAVORS:
        raise reading.wrong(("model.name",), family, f"known are {', '.join(FLAVORS)}; or give its widths as a job")
    plain = VARIANT.sub("", flavor)
    known = FLAVORS[family]
    if plain not in known:
        raise reading.wrong(("model.flavor",), flavor, f"known are {', '.join(known)}; or give its widths as a job")
    return dict(known[plain])


def _degree(reading: Reading, name: str, *, least: int = 1) -> int | None:
    return reading.whole(*(f"{table}.{name}" for table in DEGREES), least=least)


def _parallel(reading: Reading) -> tuple[dict[str, Any], int]:
    """Return the table of degrees, without dp where the file leaves it to the number of GPUs, and the replicas."""
    pp = _degree(reading, "pipeline_parallel_degree") or 1
    tp = _degree(reading, "tensor_parallel_degree") or 1
    replicas = _degree(reading, "data_parallel_replicate_degree") or 1
    shard = _degree(reading, "data_parallel_shard_degree", least=-1)
    if shard is None:
        shard = _degree(reading, "data_parallel_degree", least=-1)
    shard = -1 if shard in (None, 0) else shard
    found: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": _degree(reading, "context_parallel_degree") or 1,
        "ep": _degree(reading, "expert_parallel_degree") or 1, "zero": 0 if shard == 1 else 3,
    }  # fmt: skip
    expert_tp = reading.whole("parallelism.expert_tensor_parallel_degree")
    if expert_tp in (None, 1) and tp > 1 and found["ep"] > 1:
        found["expert_tp"] = 1
    elif expert_tp not in (None, 1, tp):
        raise reading.wrong(("parallelism.expert_tensor_parallel_degree",), expert_tp, f"allowed are 1 and {tp}")
    if shard > 0:
        found["dp"] = shard * replicas
        if replicas > 1 and shard > 1:
            found["shard"] = shard
    keeps = reading.word("parallelism.fsdp_reshard_after_forward", allowed=("default", "always", "never"))
    if found["zero"]:
        found["reshard_after_forward"] = keeps == "always" or (keeps in (None, "default") and pp == 1)
    if _truth(reading, "enable_async_tensor_parallel"):
        reading.say("assumed: enable_async_tensor_parallel hides no more than other tensor parallelism")
    if pp > 1:
        found |= _schedule(reading)
    else:
        reading.take("parallelism.pipeline_parallel_schedule")
    return found, replicas


def _truth(reading: Reading, name: str) -> bool:
    return reading.truth(*(f"{table}.{name}" for table in DEGREES))


def _schedule(reading: Reading) -> dict[str, Any]:
    given = reading.word(*(f"{table}.pipeline_parallel_schedule" for table in DEGREES)) or "1F1B"
    schedule = SCHEDULES.get(given.lower())
    if schedule is None:
        raise reading.wrong(("parallelism.pipeline_parallel_schedule",), given, f"known are {', '.join(SCHEDULES)}")
    if given.lower() not in ("1f1b", "gpipe", "interleaved1f1b"):
        reading.say(f"assumed: {printable(given, 40)} takes as long as {schedule}, with one part per stage")
    ends = [
        reading.whole(f"parallelism.pipeline_parallel_{end}_stage_less_layers", least=0) for end in ("first", "last")
    ]
    found: dict[str, Any] = {"schedule": schedule}
    if all(less in (None, 1) for less in ends):
        found["ends_count"] = True
        reading.say("assumed: the first and the last stage have one layer less each, as torchtitan's default is")
    elif ends != [0, 0]:
        raise Misconfigured(f"{WHAT} with stages that have {ends} layers less: 0 or 1 for both can be planned")
    if schedule == "interleaved":
        found["virtual"] = 2
        reading.say("assumed: two parts per stage, as torchtitan's default is; --set parallel.virtual=N changes it")
    return found


def _compiles(reading: Reading) -> bool:
    parts = reading.take("compile.components")
    if not reading.truth("compile.enable", "training.compile"):
        return False
    return parts is None or (isinstance(parts, list) and "model" in parts)


def _precision(reading: Reading) -> dict[str, str]:
    converters = reading.take("model.converters")
    named = " ".join(str(each) for each in converters) if isinstance(converters, list) else ""
    old = reading.take("training.fp8_linear")
    param = reading.word("training.mixed_precision_param", allowed=("bfloat16", "float32"))
    if reading.truth("float8.enable_float8_linear") or bool(old) or "float8" in named:
        return {"precision": "fp8", "fp8_scaling": "tensorwise"}
    if re.search(r"\bmx\b", named):
        return {"precision": "fp8", "fp8_scaling": "mxfp8"}
    for name in reading.values:
        if name.startswith(("float8.", "quantize.", "mx.")):
            reading.take(name)  # settings of converters that are not in use
    return {"precision": "fp32" if param == "float32" else "bf16"}


def _recomputation(reading: Reading) -> dict[str, Any]:
    mode = reading.word("activation_checkpoint.mode", allowed=("none", "selective", "full", "memory_budget"))
    option = str(reading.take("activation_checkpoint.selective_ac_option") or "2")
    if mode == "memory_budget":
        raise reading.wrong(("activation_checkpoint.mode",), mode, "allowed are none, selective, full")
    if mode in (None, "selective"):
        reading.say(
            f"assumed: selective recomputation by {printable(option, 20)!r} is planned as that of attention's core"
        )
    return {"recompute": mode or "selective"}
