"""Names of mechanisms: what they ask for, and what is refused with which words."""

import pytest

from counterpoint.controls.gemm_sms import GemmSmFit, GemmSmLimit
from counterpoint.controls.green_contexts import GreenContexts
from counterpoint.controls.launch_order import CommFirst
from counterpoint.controls.nccl import NcclCluster, NcclCtaPolicy, NcclCtas, NcclWindows
from counterpoint.controls.parse import parse_mechanism
from counterpoint.controls.priority import StreamPriority
from counterpoint.errors import Misconfigured
from counterpoint.tuned.choices import KNOBS


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("nccl+priority=high", StreamPriority(level="high")),
        ("nccl+priority=-2", StreamPriority(level=-2)),
        ("nccl+max_ctas=8", NcclCtas(max_ctas=8)),
        ("nccl+min_ctas=4+max_ctas=8", NcclCtas(min_ctas=4, max_ctas=8)),
        ("nccl+cga_cluster=0", NcclCluster(cga_cluster=0)),
        ("nccl+cta_policy=zero", NcclCtaPolicy(policy="zero")),
        ("nccl+windows", NcclWindows()),
        ("nccl+gemm_sms=124", GemmSmLimit(num_sms=124)),
        ("nccl+gemm_sms=fit", GemmSmFit()),
        ("nccl+green=108", GreenContexts(compute_sms=108)),
        ("nccl+order=comm_resident", CommFirst()),
    ],
)
def test_each_key_gives_its_control(name: str, control: object) -> None:
    assert parse_mechanism(name) == ("nccl", (control,))


def test_a_base_alone_has_no_controls() -> None:
    assert parse_mechanism("zero_sm") == ("zero_sm", ())


def test_streams_are_replaced_before_launches_are_wrapped() -> None:
    controls = parse_mechanism("nccl+order=comm_resident+gemm_sms=108+green=108+priority=high")[1]
    assert [type(control).__name__ for control in controls] == [
        "StreamPriority", "GreenContexts", "GemmSmLimit", "CommFirst",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["nccl+max_ctas=8+min_ctas=4", "nccl+priority=low", "nccl+windows", "nccl+order=comm_resident", "nccl+green=112"],
)
def test_names_come_back(name: str) -> None:
    base, controls = parse_mechanism(name)
    assert "+".join([base, *(control.name for control in controls)]) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "must begin with its base"),
        ("max_ctas=8", "must begin with its base"),
        ("nccl+speed=9", f"unknown key 'speed'; choose from: {', '.join(KNOBS)}"),
        ("nccl+max_ctas=8+max_ctas=4", "sets max_ctas twice"),
        ("nccl+max_ctas", "write max_ctas=N"),
        ("nccl+max_ctas=", "write max_ctas=N"),
        ("nccl+windows=yes", "write windows, without a value"),
        ("nccl+windows=", "write windows, without a value"),
        ("nccl+max_ctas=many", "max_ctas=many is not a number; write max_ctas=N"),
        ("nccl+max_ctas=0", "from 1 to 64"),
        ("nccl+max_ctas=4+min_ctas=8", "min_ctas not above max_ctas"),
        ("nccl+cga_cluster=9", r"choose 0 \(none\) to 8"),
        ("nccl+cta_policy=none", "choose from: default, efficiency, zero"),
        ("nccl+priority=5", "choose high, default, low, or a number"),
        ("nccl+priority=urgent", r"write priority=high\|default\|low\|NUMBER"),
        ("nccl+gemm_sms=0", "give 1 or more"),
        ("nccl+green=-8", "give 1 or more"),
        ("nccl+order=compute_first", "write order=comm_resident"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, words: str) -> None:
    with pytest.raises(Misconfigured, match=words):
        parse_mechanism(name)
