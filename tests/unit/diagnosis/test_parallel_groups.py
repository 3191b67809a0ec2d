"""Which parallelism a collective serves: by its group's name, else by its use, where nothing else does the same."""

import pytest

from counterpoint.diagnosis.analysis.parallel_groups import parallel_of
from counterpoint.records.diagnosis import Collective
from counterpoint.trace.classify import parallelism
from counterpoint.trace.timeline import CollectiveInfo, HostKind, Kind
from tests.support.job_builder import Host, Op, comm, diagnosed, host, op, rank

ANNOTATION, PYTHON = HostKind.ANNOTATION, HostKind.PYTHON
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("mesh_dp", "dp"),
        ("mesh_dp_shard", "dp"),
        ("mesh_dp_shard_mod_ep", "dp"),
        ("mesh_dp_shard_in_ep", "dp"),
        ("mesh_efsdp", "dp"),
        ("mesh_replicate", "dp"),
        ("mesh_etp", "tp"),
        ("mesh_sp", "sp"),
        ("mesh_dim_0", None),
        ("fsdp", "dp"),
        ("tp:0", "tp"),
        ("dcp:0", "cp"),
        ("eplb:0", "ep"),
        ("world:0", None),
        ("attention_tp:0", "tp"),
        ("moe_tp", "tp"),
        ("moe_ep", "ep"),
        ("moe_dp", "dp"),
        ("expert_data_parallel_group", "dp"),
        ("data_parallel_group", "dp"),
        ("mesh_sequence_parallel", "sp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "tp"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp+ep"),
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp+pp+ep"),
        ("TENSOR_AND_EXPERT_PARALLEL_GROUP", "tp+ep"),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp+cp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp+cp"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "dp+tp+cp"),
        ("mesh_dp_shard_cp", "dp+cp"),
        ("default_pg", None),
        ("undefined", None),
        ("MODEL_PARALLEL_GROUP", None),
        ("EMBEDDING_GROUP", None),
        ("12", None),
        ("update_group", None),
        (None, None),
    ],
)
def test_groups_are_known_by_their_names(name: str | None, parallel: str | None) -> None:
    """Only whole words count: "update" holds no data parallelism."""
    assert parallel_of(name) == parallel


@pytest.mark.parametrize(
    ("kernel", "parallel"),
    [
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "ep"),
        ("void dpsk::ep::internode::combine<true, c10::BFloat16>(int)", "ep"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "tp"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None),
        ("Memcpy PtoP (Device -> Device)", None),
    ],
)
def test_kernels_that_are_made_for_one_parallelism(kernel: str, parallel: str | None) -> None:
    """Those of experts and of inference; NCCL's serve any."""
    assert parallelism(kernel) == parallel


def collectives(
    operation: str, members: str, *, size: int = 1 << 22, count: int = 16, phase: str | None = "forward", at: float = 0
) -> list[Op | Host]:
    """Return collectives of a group, 100 µs apart, and the range of a phase around their launches."""
    info = CollectiveInfo(
        op=operation, group=members, group_ranks=members, group_size=members.count(",") + 1,
        in_nelems=size // 4, out_nelems=size // 4, dtype="Float",
    )  # fmt: skip
    parts: list[Op | Host] = []
    for number in range(count):
        begin = at + 100.0 * number
        parts.append(comm(operation, begin + 10, begin + 60, launch=begin + 5, info=info))
    around = {"forward": "Block.forward", "backward": BACKWARD, "optimizer": "Optimizer.step#Adam.step", None: "other"}
    return [*parts, host(around[phase], at, at + 100.0 * count, ANNOTATION)]


def found(*parts: Op | Host) -> tuple[Collective, ...]:
    """The collectives of rank 0 of 16."""
    made = rank(op("matmul", 0, 5, launch=-10.0), *parts, steps=((-20.0, 1e5),))
    return diagnosed(made, world_size=16).collectives


def served(*parts: Op | Host) -> set[str | None]:
    return {c.parallel for c in found(*parts)}


NEAR, APART, OUTER = "[0, 1, 2, 3]", "[0, 4]", "[0, 8]"


@pytest.mark.parametrize(
    ("parts", "parallel"),
    [
        pytest.param(collectives("all_reduce", NEAR), "tp", id="activations-of-neighbours"),
        pytest.param(collectives("all_reduce", NEAR, phase=None), None, id="phase-unknown"),
        pytest.param(collectives("all_reduce", NEAR, phase="backward"), None, id="gradients-of-neighbours"),
        pytest.param(collectives("all_reduce", NEAR, size=64), None, id="metrics"),
        pytest.param(collectives("all_reduce", NEAR, count=1), None, id="once"),
        pytest.param(collectives("all_gather", NEAR), None, id="parameters-or-activations"),
        pytest.param(collectives("all_reduce", "[1, 2, 3, 4]"), None, id="across-blocks-of-ranks"),
        pytest.param(collectives("all_reduce", APART), None, id="forward-and-apart"),
        pytest.param(collectives("all_reduce", APART, phase="backward"), "dp", id="gradients"),
        pytest.param(collectives("reduce_scatter", APART, phase="optimizer"), "dp", id="distributed-optimizer"),
        pytest.param(collectives("all_reduce", APART, phase=None), None, id="apart-phase-unknown"),
        pytest.param(collectives("all_reduce", "[0, 1, 8, 9]", phase="backward"), None, id="uneven"),
        pytest.param(collectives("send_recv", OUTER, phase=None), "pp", id="stages"),
        pytest.param(collectives("send_recv", APART), None, id="a-ring-of-contexts-or-stages"),
        pytest.param(collectives("send_recv", NEAR), None, id="a-ring-of-neighbours"),
        pytest.param(collectives("all_to_all", NEAR), None, id="experts-or-sequences"),
        pytest.param(
            [*collectives("all_to_all", NEAR), host("nn.Module: MoELayer_0", 0, 2000, PYTHON)], "ep", id="moe-layer"
        ),
        pytest.param(
            [*collectives("all_gather", NEAR), host("FSDP::all_gather (layers.0)", 0, 2000, ANNOTATION)],
            "dp", id="fsdp",
        ),
        pytest.param(
            [*collectives("all_reduce", NEAR, phase="backward"),
             host("DistributedDataParallel.forward", -50, -40, ANNOTATION)],
            "dp", id="ddp",
        ),
    ],
)  # fmt: skip
def test_groups_without_a_name_are_told_by_their_use(parts: list[Op | Host], parallel: str | None) -> None:
    """What several kinds of parallelism do in the same way stays unknown."""
    assert served(*parts) == {parallel}


def test_ddp_beside_tensor_parallelism() -> None:
    """The slices reduce in forward, too: what they reduce in backward are no gradients of replicas."""
    slices = [*collectives("all_reduce", NEAR), *collectives("all_reduce", NEAR, phase="backward", at=5000.0)]
    replicas = collectives("all_reduce", APART, phase="backward", at=8000.0)
    wrapped = host("DistributedDataParallel.forward", 0, 4000, ANNOTATION)
    groups = {(c.group, c.parallel) for c in found(*slices, *replicas, wrapped)}
    assert groups == {(NEAR, "tp"), (APART, "dp")}


def test_experts_kernels_tell_it_without_metadata() -> None:
    kernel = op("void deep_ep::intranode::dispatch<8>(int4*)", 100, 150, kind=Kind.COMM, stream=20)
    assert served(kernel) == {"ep"}
