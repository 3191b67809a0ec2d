"""The benchmark of the collective model, on the rows it comes with."""

from __future__ import annotations

from pathlib import Path

import collective_model
import msgspec
import pytest

from counterpoint.plan.cluster import Cluster
from counterpoint.plan.collective_fit import fit_protocols
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.networks import fitted_protocols, levels

HOST = Cluster(gpu=find_gpu("H200"), levels=levels("nvlink-h100", 8))


@pytest.fixture(scope="module")
def lines() -> list[collective_model.Line]:
    return collective_model.compare(collective_model.read([collective_model.ROWS]), HOST)


def test_sizes_left_out_are_predicted(lines: list[collective_model.Line]) -> None:
    """8 x H200, every operation, at most 10 % on rows that the fit did not see."""
    assert {line.operation for line in lines} == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
    assert max(line.max for line in lines) <= 0.1


def test_it_is_better_than_one_line_and_than_nccls_own_model(lines: list[collective_model.Line]) -> None:
    """The mean error of every operation is below that of both."""
    assert [line.operation for line in lines if line.mean >= min(line.line_mean, line.nccl_mean)] == []


def test_what_is_shipped_is_what_the_rows_give() -> None:
    """fits/nvlink-h200.json is the fit of the rows in benchmarks/."""
    (shipped,) = fitted_protocols()
    rows = collective_model.read([collective_model.ROWS])
    again = fit_protocols(rows, HOST, source=collective_model.SOURCE, check=False)
    for ours, theirs in zip(again, shipped.protocols, strict=True):
        assert (ours.operations, ours.source) == (theirs.operations, theirs.source)
        figures = [ours.base_us, ours.hop_us["nvlink"], ours.efficiency["nvlink"], *(phi for _, phi in ours.curve)]
        kept = [theirs.base_us, theirs.hop_us["nvlink"], theirs.efficiency["nvlink"], *(phi for _, phi in theirs.curve)]
        assert figures == pytest.approx(kept, rel=0.02, abs=0.02)  # another scipy may end its search elsewhere


def test_large_arrays_over_infiniband_are_predicted_without_a_fit() -> None:
    """4 DGX A100, all_reduce of 256 MiB and more: within 5 % from data sheets alone."""
    large = [abs(each.error) for each in collective_model.unfitted() if each.row.num_bytes >= 256 << 20]
    assert (len(large), max(large) <= 0.05) == (5, True)


def test_text_of_nccl_tests_is_rows(tmp_path: Path) -> None:
    """Whatever is neither CSV nor JSON is read as what nccl-tests printed."""
    text = (
        "# all_gather_perf\n#  Rank  1 Group  0 Pid  1 on host\n  1048576  131072  float  none  -1  22.0  1.0  1.0  0\n"
    )
    (tmp_path / "out.txt").write_text(text)
    assert [(row.operation, row.ranks, row.us) for row in collective_model.read([tmp_path / "out.txt"])] == [
        ("all_gather", 2, 22.0)
    ]


def test_a_csv_may_have_strides(tmp_path: Path) -> None:
    """A column `stride` is the spacing of ranks; without it they are neighbours."""
    (tmp_path / "rows.csv").write_text("operation,ranks,bytes,us,stride\nall_gather,16,1e6,80,8\n")
    (row,) = collective_model.read([tmp_path / "rows.csv"])
    assert msgspec.structs.astuple(row) == ("all_gather", 16, 8, 1e6, 80.0)
