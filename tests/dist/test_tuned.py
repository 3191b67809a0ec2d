"""Models and groups that follow a tuning: FSDP2, DDP, tensor and expert parallelism, the backend."""

from pathlib import Path

import pytest

from tests.dist import tuned_programs as programs
from tests.support.fsdp_training import CASES, Case
from tests.support.ranks import Ranks, finding

BITS = 1e-5  # of float32 after a step of sums in another order


EAGER = {name: case for name, case in CASES.items() if case.compiled is None and not case.meta and not case.grouped}


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "software GPU"])
@pytest.mark.parametrize("case", EAGER.values(), ids=EAGER)
def test_each_fsdp2_module_follows_its_choice(two_ranks: Ranks, case: Case, on_gpu: bool) -> None:
    """Gather and reduce_scatter apart: what is left is torch's, all else has calls, and every bit is stock's."""
    for wrong, report in two_ranks.run(programs.mixed, case, on_gpu):
        assert wrong == []
        taken = {
            module.name: tuple(module.moved(name).calls >= 3 for name in ("all_gather", "reduce_scatter"))
            for module in report.modules
        }
        assert taken == {
            "(root)": (True, True),
            "layers.0": (False, False),
            "layers.1": (True, False),
            "layers.2": (False, True),
        }
        assert report.tuned == "tuning: 6 of 6 choices followed"


def test_the_report_says_which_choice_a_module_follows(two_ranks: Ranks, tmp_path: Path) -> None:
    [(_, report), _] = two_ranks.run(programs.fsdp, "mixed", str(tmp_path))
    modules = {module.name: module for module in report.modules}
    file = str(tmp_path / "rank0.toml")
    left = f"leave by {file}: all_gather says so"
    assert modules["layers.0"].torch_why == f"{left}; leave by {file}: reduce_scatter says so"
    assert modules["layers.1"].torch_why == ""
    assert f"all_gather: zero_sm by {file}: all_gather says so" in modules["layers.1"].choice
    assert modules["(root)"].choice == ""
    lines = str(report).splitlines()
    assert f"all_gather of layers.0 and 1 more: {left}" in lines
    assert sum("torch's: as tuned" in line for line in lines) == 3


def test_a_model_that_is_left_as_a_whole_trains(two_ranks: Ranks, tmp_path: Path) -> None:
    for wrong, report in two_ranks.run(programs.fsdp, "all left", str(tmp_path)):
        assert wrong == []
        assert all(not module.traffic and module.torch_why for module in report.modules)


def test_a_file_that_changes_nothing_says_so(two_ranks: Ranks, tmp_path: Path) -> None:
    for wrong, report in two_ranks.run(programs.fsdp, "of other models", str(tmp_path)):
        assert wrong == []
        assert "changes nothing: no call so far has one of its 1 choices" in str(report)
        assert all(not module.moved("all_gather").torch_why for module in report.modules)


def test_a_knob_of_nccl_is_left_to_torch_and_told(two_ranks: Ranks, tmp_path: Path) -> None:
    """Process groups that are there already take no setting."""
    for wrong, report in two_ranks.run(programs.fsdp, "too late", str(tmp_path)):
        assert wrong == []
        [layer] = [module for module in report.modules if module.name == "layers.0"]
        assert layer.moved("all_gather").torch_why
        assert "max_ctas=8 not applied: set NCCL_MAX_CTAS=8 before the groups are made (counterpoint tune " in str(
            report
        )


test_what_ranks_find = finding({
    "modules without a name are found by size": (2, programs.by_size, (), [(True, True), *[(False, True)] * 3]),
    "check asks the communicator of a mesh from the first call on": (2, programs.checked, (), (0, 1)),
})  # fmt: skip


DIFFERENT = ("other files", "missing on one", "named on one", "of another machine")


@pytest.mark.parametrize("how", DIFFERENT)
def test_ranks_with_different_files_are_told_so(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    """All of them, with both ranks' names, before anything is changed."""
    for texts in two_ranks.run(programs.disagreeing, how, str(tmp_path)):
        for text in texts:
            assert text.startswith("Misconfigured: ranks follow different tunings: ")
            assert " on rank 0, " in text
            assert " on rank 1; give all the same (argument tuned, variable COUNTERPOINT_TUNED)" in text


@pytest.mark.parametrize("how", ["replicated", "tensor parallel"])
def test_ranks_that_share_no_group_with_the_odd_one_are_told_too(four_ranks: Ranks, how: str, tmp_path: Path) -> None:
    """Rank 3 has another file, and rank 0 is on both other axes."""
    for text in four_ranks.run(programs.disagreeing_on_a_mesh, how, str(tmp_path)):
        assert text.startswith("Misconfigured: ranks follow different tunings: ")
        assert " on rank 3; give all the same" in text


def test_a_file_that_is_nowhere_is_an_error(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, texts in enumerate(two_ranks.run(programs.disagreeing, "missing on all", str(tmp_path))):
        for text in texts:
            assert "No such file or directory" in text
            assert f"rank{rank}.toml" in text


@pytest.mark.parametrize(
    ("how", "warnings", "left"),
    [
        ("this one", [], 1),
        ("gpu", ["UserWarning: tuning: made with gpu NVIDIA H200, here is none: all choices ignored"], 0),
        ("counterpoint", ["UserWarning: tuning: made with counterpoint 9, here is 0.1.0: all choices followed"], 1),
    ],
)
def test_a_file_of_another_machine_warns_once(two_ranks: Ranks, how: str, warnings: list[str], left: int) -> None:
    """And built-in rules decide what depends on it."""
    assert two_ranks.run(programs.warned, how) == [(warnings, left)] * 2


def test_off_turns_the_variable_off(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, texts in enumerate(two_ranks.run(programs.turned_off, str(tmp_path))):
        assert texts == [f"{tmp_path}/rank{rank}.toml: 6 of 6 choices followed", "", ""]


def test_buckets_of_ddp_follow_the_choice_of_their_size(two_ranks: Ranks) -> None:
    """Gradients are those of torch's DDP either way: sums of two have one order."""
    for equal, (left, ours) in two_ranks.run(programs.ddp):
        assert equal == [True, True]
        assert [(row.path, row.calls) for row in left.calls] == [("torch", 3)]
        assert {row.path for row in ours.calls} == {"zero_sm"}
        assert sum(row.calls for row in ours.calls) == 3
        assert left.modules[0].choice == "all_reduce of 0.0 MB: leave by tuning: all_reduce says so"
        assert str(ours).endswith("tuned: tuning: 1 of 2 choices followed")


def test_a_dtype_on_the_wire_comes_before_a_choice(two_ranks: Ranks) -> None:
    """torch would send another one."""
    for report in two_ranks.run(programs.on_the_wire):
        assert [(row.path, row.why, row.calls) for row in report.calls] == [("zero_sm", "in place", 3)]


@pytest.mark.parametrize("mechanism", ["serial", "torch"])
def test_matmuls_of_tensor_parallelism_follow_the_choice_of_their_shape(two_ranks: Ranks, mechanism: str) -> None:
    """Two layers, each with a gather before the feed-forward and one before the attention; none after `restore`."""
    for difference, report, after in two_ranks.run(programs.tensor_parallel, mechanism):
        assert difference < BITS
        rows = [row for row in report.calls if " by tuning: " in row.why]
        tuned = {(row.operation, row.path, row.why.partition(" by ")[0]): row.calls for row in rows}
        assert tuned[("all_gather_matmul", mechanism, mechanism)] == 2
        assert tuned[("all_gather_matmul", "torch", "leave")] >= 2
        assert report.tuned == "tuning: 2 of 2 choices followed"
        assert "by tuning" not in after


@pytest.mark.parametrize(("tuned", "below"), [("off", False), (None, True)])
def test_operations_by_themselves_follow_the_variable(
    two_ranks: Ranks, tuned: str | None, below: bool, tmp_path: Path
) -> None:
    """As styles and torchtitan's layers use them; `overlap` may turn it off until `restore`."""
    for first, second, third in two_ranks.run(programs.operations, str(tmp_path), tuned):
        assert (first, third) == ("leave", "leave")
        assert (second == "leave") == below


@pytest.mark.needs("transformers")
def test_each_layer_of_experts_follows_its_choice(two_ranks: Ranks, tmp_path: Path) -> None:
    """One exchanges as chosen, the other as without `overlap`."""
    for difference, report in two_ranks.run(programs.expert_parallel, str(tmp_path)):
        assert difference < 1e-11
        first, second = report.of_kind("expert")
        assert first.choice == "slabs by tuning: exchange says so"
        assert (first.torch_why, second.torch_why) == ("", "leave by tuning: exchange says so")
        assert {row.path for row in report.calls} == {"slabs"}


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("factor", "found"), [(0.5, True), (2.0, True), (0.4, False), (2.1, False)])
def test_layers_of_experts_are_found_by_size(two_ranks: Ranks, factor: float, found: bool, tmp_path: Path) -> None:
    expected = ["gather by tuning: exchange says so" if found else ""] * 2
    assert two_ranks.run(programs.experts_by_size, factor, str(tmp_path)) == [expected] * 2


@pytest.mark.needs("transformers")
def test_experts_that_are_left_on_gpus_are_taken_for_a_choice(two_ranks: Ranks, tmp_path: Path) -> None:
    """It was measured; all others stay, with the reason that they have without a file."""
    expected = [("slabs by tuning: exchange says so", ""), ("", "not measured")]
    assert two_ranks.run(programs.experts_not_asked_for, str(tmp_path)) == [expected] * 2


def test_a_model_is_as_before_after_an_error(two_ranks: Ranks) -> None:
    for text, is_unchanged in two_ranks.run(programs.unchanged):
        assert text.startswith("Misconfigured: nowhere.toml: No such file or directory")
        assert is_unchanged


def test_calls_of_the_backend_follow_the_choice_of_their_size(two_ranks: Ranks) -> None:
    """Before crossovers, which decide where there is no choice."""
    for report in two_ranks.run(programs.of_backend):
        found = {(row.operation, row.path, row.why) for row in report.calls}
        assert found == {
            ("all_reduce", "torch", "leave by tuning: all_reduce says so"),
            ("all_reduce", "zero_sm", "copied from its landing"),
            ("all_gather", "zero_sm", "copied from its landing, zero_sm by tuning: all_gather says so"),
            ("all_gather", "torch", "below the crossover"),
        }
        assert str(report).endswith("tuned: tuning: 2 of 2 choices followed")


@pytest.mark.needs("transformers")
def test_check_asks_the_communicators_of_dispatchers(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(programs.checked_experts, str(tmp_path)) == [1, 1]
