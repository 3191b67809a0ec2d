"""`overlap` of a tensor-parallel model, beside torch's own run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import tensor_parallel_programs as programs
from tests.support.ranks import Ranks

BITS = 1e-11  # of float64, after steps of AdamW; a missing sum or a bias added twice is at 1e-3 and more
GATHERED = [name for name, case in programs.CASES.items() if case.sequence and not case.sharded]
REPLICATED = [name for name, case in programs.CASES.items() if not case.sequence and not case.sharded]


@pytest.mark.parametrize("name", GATHERED)
def test_sequence_parallel_layers_share_a_gather(two_ranks: Ranks, name: str) -> None:
    """Losses and gradients of three steps; in each step a gather for each attention, feed-forward and the head."""
    per_step = 2 * 2 + 1 + 2 * 2  # gathers before matmuls forward, and for sums backward
    if name == "autocast":  # which multiplies in another dtype than it gathers
        per_step = 1 + 2 * 2
    if name == "checkpointed":
        per_step += 2 * 2
    for difference, calls, report in two_ranks.run(programs.beside_stock, name):
        assert difference < (0.05 if name == "autocast" else BITS)
        assert calls["all_gather_matmul"] == programs.STEPS * per_step
        assert "matmul_all_reduce" not in calls
        assert {row.name for row in report.modules if not row.runs} == {"embedding"}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicated_layers_share_an_all_reduce(two_ranks: Ranks, name: str) -> None:
    """Two for each layer forward, two and that of the head backward."""
    per_step = 4 + 5 + (2 * 2 if "checkpointed" in name else 0)
    for difference, calls, report in two_ranks.run(programs.beside_stock, name):
        assert difference < (0.05 if "autocast" in name else BITS)
        assert calls == {"matmul_all_reduce": programs.STEPS * per_step}
        assert all(row.runs and not row.torch_why for row in report.modules)


@pytest.mark.parametrize("name", ["with FSDP2", "replicated, with FSDP2"])
def test_fsdp2_on_the_other_axis_is_overlapped_too(four_ranks: Ranks, name: str) -> None:
    for difference, calls, report in four_ranks.run(programs.beside_stock, name):
        assert difference < BITS
        assert sum(calls.values()) == programs.STEPS * (9 if "replicated" in name else 18)
        assert {len(row.ranks) for row in report.modules if row.runs} == {2}


@pytest.mark.parametrize("mechanism", ["torch", "serial", "cuts"])
@pytest.mark.parametrize("name", ["bias", "replicated"])
def test_float32_is_as_exact_as_torch(two_ranks: Ranks, name: str, mechanism: str) -> None:
    """Each way in which the operations can run; sums have another order."""
    for ours, torchs, paths in two_ranks.run(programs.errors, name, mechanism):
        assert ours <= 2 * torchs
        assert paths == {mechanism} or mechanism == "cuts"


def test_no_derivative_of_a_weight_is_copied(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.copied_gradients) == [[]] * 2


def test_styles_work_by_themselves(two_ranks: Ranks) -> None:
    """Without `overlap` only layers below `PrepareModuleInput` wait for a gather of torch's."""
    for difference, calls, refused in two_ranks.run(programs.by_styles):
        assert difference < BITS
        assert calls == {"all_gather_matmul": 3 * (1 + 4), "matmul_reduce_scatter": 3 * (4 + 1)}
        assert refused == "Rowwise: it is no nn.Linear, but Embedding; use torch's RowwiseParallel for this module"


def test_the_report_names_every_module(two_ranks: Ranks) -> None:
    [(_, _, report), _] = two_ranks.run(programs.beside_stock, "bias")
    rows = {row.name: row for row in report.modules}
    assert rows["layers.1.attention"].shared_with == tuple(f"layers.1.attention.{x}" for x in ("query", "key", "value"))
    assert rows["layers.0.ffn.up"].shared_with == ("layers.0.ffn.gate",)
    assert rows["layers.0.ffn.down"].runs == "matmul_reduce_scatter"
    assert rows["embedding"].torch_why == "it is no nn.Linear, but Embedding"
    assert "layers.0.ffn.gate" in str(report)


def test_restore_gives_torch_back(two_ranks: Ranks) -> None:
    for kept in two_ranks.run(programs.restored):
        assert kept == [True] * 6


@pytest.mark.parametrize("dtensors", [False, True], ids=["local tensors", "DTensors"])
@pytest.mark.parametrize("in_place", [False, True], ids=["as it was", "changed in place"])
def test_layers_with_other_inputs_come_apart(two_ranks: Ranks, dtensors: bool, in_place: bool) -> None:
    """Layers that are called twice, that have one weight, and one whose input is not that of its siblings."""
    pair = {"one": (), "two": ()} if in_place else {"one": ("two",), "two": ("one",)}
    for first, second, shared in two_ranks.run(programs.odd, dtensors, in_place):
        assert max(first, second) < BITS
        assert shared == pair | {"other": (), "back": ()}


def test_a_copy_of_the_model_has_its_own_weights(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.copied) == [(True, True)] * 2


def test_strangers_are_left_alone_and_named(two_ranks: Ranks) -> None:
    for same, why, all_left, none in two_ranks.run(programs.strangers):
        assert same
        assert why["0"].startswith("its style is not torch's: tests.dist.tensor_parallel_programs._Stranger")
        assert why["1"] == "it is no nn.Linear, but _OwnLinear"
        assert why["2"].startswith("it has a hook that is not torch's: tests.dist.tensor_parallel_programs.strangers")
        assert why["5"] == ""
        assert all_left.startswith("Unsupported: nothing to overlap: 0: its style is not torch's")
        assert none.startswith("Misconfigured: no module of this model is sharded")


@pytest.mark.needs("torch-2.13")
def test_rows_that_do_not_divide_are_torchs(two_ranks: Ranks) -> None:
    """By stock torch 2.11 they fail."""
    for difference, why in two_ranks.run(programs.uneven):
        assert (difference < BITS, why) == (True, "7 rows do not divide by 2 ranks")


@pytest.mark.needs("transformers")
def test_a_plan_of_transformers(two_ranks: Ranks, tmp_path: Path) -> None:
    for difference, calls, report in two_ranks.run(programs.with_transformers, str(tmp_path)):
        assert difference < BITS
        assert calls == {"matmul_all_reduce": programs.STEPS * 9 + 4}  # and four of an evaluation
        assert len(report.modules) == 2 * 7 + 2
        assert {row.name for row in report.modules if not row.runs} == {"model.embed_tokens"}
