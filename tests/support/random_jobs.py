"""Jobs that nobody would think of: models, divisions and machines drawn at random, all of them possible."""

from random import Random
from typing import Any

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import GPUS
from counterpoint.plan.job.job import Job, parse_job
from counterpoint.plan.step.step import predict_step

NETWORKS = ("a100-hdr-200", "h100-ndr-400", "h100-roce-400", "h200-ndr-400")


def random_job(seed: int) -> Job:
    """Return the job of a seed: the first of its draws that is possible and has a prediction."""
    draw = Random(seed)
    while True:
        try:
            job = parse_job(random_tables(draw))
            predict_step(job)
        except Misconfigured:
            continue
        return job


def random_tables(draw: Random) -> dict[str, Any]:
    """Return the tables of a job's file; where they do not go together, the reader refuses them."""
    parallel = _parallel(draw)
    parallel |= _expert_exchange(Random(repr(parallel)))  # of its own, so that all else is as it was drawn before
    tables: dict[str, Any] = {
        "model": _model(draw),
        "training": _training(draw, parallel["dp"], parallel["pp"]),
        "parallel": parallel,
        "cluster": _cluster(draw, parallel["dp"] * parallel["tp"] * parallel["pp"] * parallel["cp"]),
        "overlap": {"mechanism": draw.choice(["nccl", "nccl", "zero_sm", "nccl_zero_cta", "ideal", "serial"])},
    }
    if parallel["zero"] == 0 and draw.random() < 0.2:
        tables["compression"] = {"method": draw.choice(["powersgd", "topk", "randomk", "quantized"])}
    if draw.random() < 0.2:
        tables["ranks"] = {"slow": draw.choice([1.0, 1.1, 2.0]), "jitter": draw.choice([0.0, 0.02, 0.2])}
    return tables


def _model(draw: Random) -> dict[str, Any]:
    heads = draw.choice([4, 8, 12, 16, 32, 40, 64])
    model: dict[str, Any] = {
        "layers": draw.choice([2, 4, 8, 12, 24, 48]),
        "heads": heads,
        "hidden": heads * draw.choice([8, 56, 64, 96, 128]),
        "vocab": draw.choice([1000, 32000, 50257, 128256]),
    }
    options = {
        "kv_heads": draw.choice([1, heads // 4, heads]),
        "ffn": draw.choice([model["hidden"], 3 * model["hidden"], 8 * model["hidden"], 1000, 11008]),
        "gated": draw.random() < 0.6, "tied": draw.random() < 0.3, "dropout": draw.random() < 0.3,
        "causal": draw.random() < 0.8, "head_dim": draw.choice([32, 80, 256]), "qk_norm": draw.random() < 0.3,
        "bias": draw.choice(["none", "qkv", "all"]), "norms": draw.choice([2, 4]),
    }  # fmt: skip
    model |= {name: value for name, value in options.items() if draw.random() < 0.6}
    if model.get("causal", True) and draw.random() < 0.1:
        model |= {"window": draw.choice([128, 4096]), "full_every": draw.choice([1, 2])}
    if draw.random() < 0.1:
        model = {name: value for name, value in model.items() if name not in ("kv_heads", "head_dim")}
        model["mla"] = {
            "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        }  # fmt: skip
        model["mtp"] = draw.choice([0, 1])
    if draw.random() < 0.3:
        model["experts"] = {
            "count": draw.choice([4, 8, 64]), "per_token": draw.choice([1, 2, 4]),
            "width": draw.choice([100, 256, 1408, 8192]), "shared": draw.choice([0, 0, 1]),
            "every": draw.choice([1, 1, 2]), "imbalance": draw.choice([1.0, 1.0, 1.3]),
        }  # fmt: skip
    return model


def _parallel(draw: Random) -> dict[str, Any]:
    pp = draw.choice([1, 1, 2, 4])
    virtual = draw.choice([1, 2]) if pp > 1 else 1
    parallel: dict[str, Any] = {
        "dp": draw.choice([1, 2, 4, 16, 64]), "tp": draw.choice([1, 1, 2, 4, 8]), "pp": pp,
        "cp": draw.choice([1, 1, 1, 2, 4]), "ep": draw.choice([1, 1, 2, 4]), "virtual": virtual,
        "schedule": "interleaved" if virtual > 1 else draw.choice(["gpipe", "1f1b", "zero_bubble"]),
        "zero": draw.choice([0, 1, 2, 3]), "bucket_bytes": draw.choice([1 << 20, 25 << 20, 1 << 30]),
        "prefetch": draw.choice([1, 2]),
    }  # fmt: skip
    flags = ("sequence", "reshard_after_forward", "overlap_tp", "overlap_dp", "overlap_pp")
    return parallel | {name: draw.random() < 0.7 for name in flags}


def _expert_exchange(draw: Random) -> dict[str, Any]:
    return {
        "expert_exchange": draw.choice(["all_to_all", "gather", "slabs", "slabs"]),  # draws as four did
        "capacity_factor": draw.choice([0.8, 1.0, 1.25, 2.0]),
        "overlap_ep": draw.random() < 0.5,
    }


def _training(draw: Random, dp: int, pp: int) -> dict[str, Any]:
    micro = draw.choice([1, 1, 2, 4])
    return {
        "sequence": draw.choice([128, 1000, 1024, 2048, 8192, 131072]), "micro_batch": micro,
        "global_batch": dp * micro * pp * draw.choice([1, 2, 8, 40]),
        "precision": draw.choice(["bf16", "bf16", "fp16", "fp32", "fp8"]),
        "recompute": draw.choice(["none", "selective", "full"]),
        "optimizer": draw.choice(["adam", "adam", "adam8bit", "sgd"]), "grad_bytes": draw.choice([2, 4]),
        "flash_attention": draw.random() < 0.7, "fused_kernels": draw.random() < 0.6,
        "fused_accumulation": draw.random() < 0.6, "fused_norms": draw.random() < 0.6,
        "cuda_graphs": draw.random() < 0.3, "fp8_scaling": draw.choice(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "fp8_attention": draw.random() < 0.3, "flash_version": draw.choice([1, 2, 3]),
    }  # fmt: skip


def _cluster(draw: Random, ranks: int) -> dict[str, Any]:
    gpu = draw.choice(["A100", "H100", "H200", *GPUS])
    if draw.random() < 0.7:
        return {"gpu": gpu, "network": draw.choice(NETWORKS)}
    node = draw.choice([4, 8])
    levels = [
        {"name": "node", "kind": draw.choice(["nvlink", "pcie"]), "size": node, "gb_per_s": 50.0, "latency_us": 1}
    ]
    if ranks > node:
        size = node * -(-ranks // node)
        more = {"latency_us": draw.choice([0.0, 2.0]), "oversubscription": draw.choice([1.0, 4.0])}
        rate = draw.choice([3.0, 12.5, 50.0])
        levels.append({"name": "net", "kind": "network", "size": size, "gb_per_s": rate, **more})
    return {"gpu": gpu, "levels": levels}
