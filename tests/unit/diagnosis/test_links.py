"""What links carry is said only of a known GPU and of groups on one host."""

from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.diagnosis.analysis.accounts import link_of_group
from counterpoint.diagnosis.reading.traced_job import assemble
from counterpoint.machine.gpus import link_gb_per_s
from counterpoint.machine.profile import VARIABLE
from tests.support.job_builder import H200, digested, op, rank


def link(
    *, ranks: tuple[int, ...] = (0, 1), world: int = 8, gpus: int | None = 8, name: str = "NVIDIA H200",
    members: tuple[int, ...] | None = None, indices: tuple[int, ...] | None = None,
) -> float | None:  # fmt: skip
    """Return the rate of a group of a job whose recorded ranks have GPUs in their order, or these."""
    devices = [replace(H200, name=name, host_gpus=gpus, index=r % (gpus or 8)) for r in ranks]
    if indices:
        devices = [replace(d, index=i) for d, i in zip(devices, indices, strict=True)]
    made = [rank(op("matmul", 0, 10), device=d) for d in devices]
    return link_of_group(assemble([digested(m, r, world) for m, r in zip(made, ranks, strict=True)]), members)


@pytest.mark.parametrize(
    ("job", "rate"),
    [
        pytest.param({}, 450.0, id="one-host"),
        pytest.param({"ranks": (0,)}, 450.0, id="one-rank-of-a-full-host"),
        pytest.param({"world": 16, "members": (8, 9, 10)}, 450.0, id="within-one-of-two-hosts"),
        pytest.param({"world": 16, "members": (0, 8)}, None, id="across-two-hosts"),
        pytest.param({"world": 16}, None, id="the-whole-of-two-hosts"),
        pytest.param({"world": 2}, 450.0, id="all-ranks-on-part-of-a-host"),
        pytest.param({"world": 2, "ranks": (0,)}, None, id="a-host-each-or-together"),
        pytest.param({"world": 2, "indices": (0, 0)}, None, id="a-host-each"),
        pytest.param({"world": 12, "members": (0, 1)}, None, id="uneven-hosts"),
        pytest.param({"gpus": None}, None, id="hosts-unknown"),
        pytest.param({"name": "NVIDIA L40S"}, None, id="no-links"),
        pytest.param({"name": "Ada Lovelace 1"}, None, id="unknown-gpu"),
    ],
)
def test_links_of_a_group(job: dict[str, object], rate: float | None) -> None:
    """Where ranks may be on several hosts nothing is said."""
    assert link(**job) == rate  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 450.0), ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", 900.0), ("NVIDIA H800", 200.0), ("NVIDIA A100-SXM4-80GB", 300.0),
        ("NVIDIA A100-PCIE-40GB", None), ("NVIDIA A100 80GB PCIe", None), ("Tesla V100-SXM2-32GB", 150.0),
        ("Tesla V100-DGXS-32GB", None), ("AMD Instinct MI300X", 448.0), ("NVIDIA A10G", None), (None, None),
    ],
)  # fmt: skip
def test_data_sheets(name: str | None, rate: float | None) -> None:
    """Cards on PCIe have other links than the modules of the same chip."""
    assert link_gb_per_s(name) == rate


def test_a_profile_of_ones_own_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another GPU says nothing of this one."""
    profiles = Path(__file__).parents[3] / "src" / "counterpoint" / "machine" / "profiles"
    monkeypatch.setenv(VARIABLE, str(profiles / "h200.json"))
    assert link() == 384.0
    monkeypatch.setenv(VARIABLE, str(profiles / "a100.json"))
    assert link() == 450.0
