"""Tests that PyTorch's wheel brings for its own backends pass on backend `counterpoint`, whose communicator takes them.

`benchmarks/torch_tests.py` runs all of them, and those of a checkout of pytorch; these are few, and fast.
"""

from collections import Counter
from pathlib import Path

from torch_tests import Runner

SUITE = """
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestOwn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""
NAMES = (
    "test_DistributedDataParallelCPU", "test_all_gather", "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup", "test_all_reduce_coalesced_sum", "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max", "test_all_reduce_min", "test_all_reduce_product", "test_all_reduce_sum",
    "test_all_reduce_sum_async", "test_all_reduce_sum_complex", "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags", "test_broadcast", "test_destroy_group", "test_get_future",
    "test_reduce_sum_twice", "test_send_recv_any_source", "test_sparse_all_reduce_sum",
)  # fmt: skip


def test_torch_own_tests_pass(tmp_path: Path) -> None:
    folder, calls = tmp_path / "test" / "distributed", tmp_path / "calls"
    folder.mkdir(parents=True)
    (folder / "test_own.py").write_text(SUITE)
    runner = Runner(tmp_path, "cpu", ranks=3, seconds=60, folder=tmp_path / "logs")
    names = [f"TestOwn::{name}" for name in NAMES]
    results = runner.run("test_own.py", names, ours=True, calls=calls)
    assert {name: result for name, result in results.items() if result["outcome"] != "passed"} == {}
    ways = Counter(line.rpartition("\t")[2] for line in calls.read_text().splitlines())
    assert ways["zero_sm"] > 100, ways
