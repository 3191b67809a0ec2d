"""Layers of experts in parts, by themselves and under models of `transformers`, beside stock."""

from pathlib import Path

import pytest

from tests.dist import expert_parallel_programs as programs
from tests.support.ranks import Ranks

SUMS = 1e-11  # of float64
WEIGHTS = 1e-6  # where one of a token's weights, which are float32, is rounded the other way
SINGLE = (
    5e-3  # of float32, where small derivatives are differences of large numbers; a wrong divisor is at 0.5 and more
)


@pytest.mark.parametrize("name", programs.LAYOUTS)
def test_experts_by_themselves(four_ranks: Ranks, name: str) -> None:
    """FSDP2 has two meshes: the experts lie on pairs of ranks that have the same ones, all else on four."""
    for difference, report in four_ranks.run(programs.beside_one_process, name):
        assert difference < {"experts on all": SINGLE, "graph": WEIGHTS}.get(name, SUMS)
        if report is not None:
            taken = {row.name: len(row.ranks) for row in report.modules if not row.torch_why}
            experts = {} if name == "experts on all" else {f"layers.{layer}.ffn.experts": 2 for layer in range(2)}
            assert taken == {"(root)": 4, "layers.0": 4, "layers.1": 4} | experts


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", programs.SPREADS)
def test_experts_of_transformers(two_ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Losses and gradients of three steps, and an evaluation, which `transformers` does without an exchange."""
    parts = {"whole": 1, "by torch": 3}.get(name, 2)
    passes = programs.STEPS * (2 if name == "checkpointed" else 1) + (name != "one batch")
    for difference, report in two_ranks.run(programs.with_transformers, name, str(tmp_path)):
        assert difference < SUMS
        assert [row.name for row in report.modules] == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
        why = "without derivatives nothing is exchanged" if name == "one batch" else ""
        assert {(len(row.ranks), row.runs, row.torch_why) for row in report.modules} == {(2, f"in {parts} parts", why)}
        calls = {row.operation: row.calls for row in report.calls}
        assert calls == {"dispatch": 2 * parts * passes, "combine": 2 * parts * passes}
        options = programs.SPREADS[name].options
        assert {row.path for row in report.calls} == {"torch" if options is None else options.mechanism}


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", programs.SPREADS_OF_FOUR)
def test_experts_of_transformers_beside_other_parallelism(four_ranks: Ranks, name: str, tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    for difference, report in four_ranks.run(programs.with_transformers, name, str(tmp_path)):
        assert difference < SUMS
        ranks = {row.name: len(row.ranks) for row in report.modules if not row.torch_why}
        if name == "two meshes":
            assert (ranks["model.layers.0"], ranks[experts]) == (4, 2)
        else:
            assert (ranks["model.layers.0"], ranks.get(experts)) == (2, None)
            assert report.of_kind("tensor")
        assert experts in str(report)


@pytest.mark.needs("transformers")
def test_what_cannot_be_taken_is_named(two_ranks: Ranks, tmp_path: Path) -> None:
    for (again, longer), left, is_restored, autocast in two_ranks.run(programs.refusals, str(tmp_path)):
        assert again.startswith("Misconfigured: model.layers.0.mlp.experts is overlapped already: call restore()")
        assert longer.startswith("Misconfigured: rank 0 dispatches 3 tokens at once, more than max_tokens=2: give a")
        assert is_restored
        assert autocast == "in 2 parts; some calls as it was: autocast, which computes experts in another dtype"
        assert left == [
            "its tokens are brought by AllReduceEP",
            "its experts have a bias",
            "its experts have no gate",
            "its experts are computed by sonicmoe",
        ]
