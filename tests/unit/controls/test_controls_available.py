"""`available` says why not, and never raises; options that a process group gets; splits that a GPU can make."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from counterpoint.controls.control import Control, no_driver_calls
from counterpoint.controls.green_contexts import plan_split
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import Misconfigured

ALL = "nccl+priority=high+green=108+max_ctas=8+cga_cluster=2+cta_policy=zero+windows+gemm_sms=108+order=comm_resident"


@pytest.mark.parametrize("control", parse_mechanism(ALL)[1], ids=lambda control: control.name)
def test_without_a_gpu_each_control_says_so(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert control.available() == f"PyTorch {torch.__version__} sees no GPU"


def test_missing_driver_calls_are_named() -> None:
    """Old or missing cuda-bindings are a reason with what to install."""
    reason = no_driver_calls("cuNoSuchCall")
    assert reason in (
        "cuda-bindings is not installed: pip install 'counterpoint[torch]'",
        "cuda-bindings is too old: it lacks cuNoSuchCall",
    )


def test_another_module_of_that_name_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `cuda` that is no package is a missing cuda-bindings, not an exception."""
    for name in [*filter(lambda name: name.startswith("cuda."), sys.modules)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    assert no_driver_calls() == "cuda-bindings is not installed: pip install 'counterpoint[torch]'"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("nccl+max_ctas=8", {"max_ctas": 8}),
        ("nccl+min_ctas=4", {"min_ctas": 4, "max_ctas": 64}),  # NCCL refuses a minimum without a maximum
        ("nccl+cga_cluster=2", {"cga_cluster_size": 2}),
        ("nccl+cta_policy=zero", {"cta_policy": 2}),
        ("nccl+cta_policy=efficiency", {"cta_policy": 1}),
        ("nccl+gemm_sms=108", {}),
    ],
)
def test_process_groups_are_told(name: str, config: dict[str, int]) -> None:
    options = SimpleNamespace(config=SimpleNamespace())
    for control in parse_mechanism(name)[1]:
        control.configure(options)
    assert vars(options.config) == config


@pytest.mark.parametrize(("level", "raised"), [("high", True), ("-1", True), ("default", False), ("low", False)])
def test_nccls_own_stream_is_raised_with_the_priority(level: str, raised: bool) -> None:
    options = SimpleNamespace()
    parse_mechanism(f"nccl+priority={level}")[1][0].configure(options)
    assert options.is_high_priority_stream is raised


@pytest.mark.parametrize(("compute_sms", "side"), [(124, "comm"), (108, "comm"), (112, "compute"), (8, "compute")])
def test_one_cut_gives_both_sides(compute_sms: int, side: str) -> None:
    """On 132 SMs in groups of 8, either side may be the group."""
    assert plan_split(compute_sms, total=132, grain=8) == side


@pytest.mark.parametrize(
    ("compute_sms", "words"),
    [(110, "nearest: 104, 108, 112, 116"), (132, "nearest: 112, 116, 120, 124"), (4, "nearest: 8, 12, 16, 20")],
)
def test_a_split_that_cannot_be_had_names_those_that_can(compute_sms: int, words: str) -> None:
    with pytest.raises(Misconfigured, match=words):
        plan_split(compute_sms, total=132, grain=8)


def test_a_gpu_of_one_group_cannot_be_split() -> None:
    with pytest.raises(Misconfigured, match="nearest: none"):
        plan_split(8, total=12, grain=8)
