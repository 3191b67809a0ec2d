"""The judge of the rule: what is fitted, what is held out, and what counts as a hit."""

import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from budget_rule import Split, best_fixed, judge, pairs_of, products_of, regret, score, split_of
from measure_suites import BUDGET, BUDGET_LIMITS, BUDGET_SIZES, BUDGET_SMS
from synthetic_machine import SyntheticMachine

from counterpoint.errors import Misconfigured
from counterpoint.pair.choice import ORDERS
from counterpoint.pair.curves import Curves, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.records.measurement import BlockRow, Environment, Measurement, Row

ROOT = Path(__file__).parents[3]
SHAPES = ((2048, 2816, 8192), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 6144, 4096))
TRIED = tuple(map(SmSplit.parse, BUDGET))


def measured(noise: float = 0.0) -> tuple[list[Row], list[BlockRow]]:
    """4 GEMMs x 2 lengths on the made-up machine."""
    machine = SyntheticMachine(noise=noise, random=random.Random(1))
    rows = [
        machine.row(
            shape, "all_gather", int(machine.gemm_us(shape, 132) * ratio * 460e3), ratio,
            choice.mechanism, order,
        )
        for shape in SHAPES for ratio in (0.5, 1.0) for choice in TRIED for order in ORDERS
    ]  # fmt: skip
    return rows, machine.blocks(SHAPES, (*BUDGET_SMS, 132), BUDGET_SIZES, BUDGET_LIMITS)


def curves(alone: list[BlockRow]) -> Curves:
    return curves_from(alone, products_of(alone), layout=SmLayout(gpc_sms=(132,), gemm_cluster=1))


def test_an_exact_machine_is_hit_always() -> None:
    rows, alone = measured()
    found = [each for each in judge(rows, curves(alone))["scores"] if each["policy"] == "rule"]
    assert {each["hits"] for each in found} == {1.0}


def test_held_out_pairs_are_never_fitted() -> None:
    rows, alone = measured(noise=0.02)
    split = split_of(pairs_of(rows, curves(alone))[0])
    double = SyntheticMachine().told
    other = [
        row
        if row.ratio is not None and split.group(row.workload, row.ratio) == "fitted"
        else msgspec.structs.replace(row, together=double(2 * row.together.us))
        for row in rows
    ]
    before, after = (judge(each, curves(alone)) for each in (rows, other))
    assert before["calibration"] == after["calibration"]
    assert before["error_fitted"] == after["error_fitted"]


def test_pairs_of_another_run_are_judged_and_never_fitted() -> None:
    rows, alone = measured(noise=0.02)
    before, after = judge(rows, curves(alone)), judge(rows, curves(alone), unseen=measured(noise=0.05)[0])
    counts = {each["pairs"]: each["count"] for each in after["scores"]}
    assert (after["calibration"], counts["unseen, mean of orders"]) == (before["calibration"], 8)


def test_a_new_workload_or_length_is_held_out() -> None:
    split = Split(workloads=frozenset({"a"}), lengths=frozenset({1.0}))
    groups = [split.group(workload, length) for workload in "ab" for length in (1.0, 2.0)]
    assert groups == ["fitted", "new length", "new GEMM", "new GEMM and length"]


def test_what_the_rule_was_designed_on_is_never_new() -> None:
    """8192³ was in view when the rule was made: it stands last of four, which alone would hold it out."""
    rows, alone = measured()
    split = split_of(pairs_of(rows, curves(alone))[0])
    assert split.group("gemm 8192x8192x8192", 0.5) == "fitted"


def test_sizes_are_not_mixed_in_one_pair() -> None:
    """Two runs of a suite choose other sizes for the same ratio; times of one say nothing about the other."""
    rows, alone = measured()
    other = msgspec.structs.replace(rows[0], size_bytes=2 * rows[0].size_bytes)
    pairs, left_out = pairs_of([other, *rows[1:]], curves(alone))
    said = f"{rows[0].scenario}: whole, measured at several sizes, which cannot be compared"
    assert (len(pairs), left_out) == (7, [said])


def test_one_workload_cannot_be_split() -> None:
    """Without a second workload nothing can be held out, which is said."""
    rows, alone = measured()
    with pytest.raises(Misconfigured, match="1 workloads at 2 lengths"):
        judge([row for row in rows if row.workload == rows[0].workload], curves(alone))


def test_marked_and_missing_rows_are_told() -> None:
    rows, alone = measured()
    spoilt = [msgspec.structs.replace(rows[-1], marked="no effect")]
    pairs, left_out = pairs_of([*rows[:-1], *spoilt], curves(alone))
    assert left_out == [f"{rows[-1].scenario}: {rows[-1].mechanism}"]
    assert len(pairs[-1].together_us) == len(TRIED) - 1


def test_a_division_beyond_the_curves_is_told() -> None:
    rows, alone = measured()
    few = [block for block in alone if "max_ctas=4" not in block.mechanism or block.size_bytes is None]
    _, left_out = pairs_of(rows, curves(few))
    assert left_out[0] == f"{rows[0].scenario}: nccl+max_ctas=4+cga_cluster=2+gemm_sms=128"


def test_without_plain_nccl_a_pair_is_left_out() -> None:
    rows, alone = measured()
    _, left_out = pairs_of([row for row in rows if row.mechanism != "nccl"], curves(alone))
    assert sum("nothing to compare with" in reason for reason in left_out) == 8


def test_regret_is_told_by_measured_times() -> None:
    """T of the pick over T of the best, minus 1, over the orders asked for."""
    rows, alone = measured()
    pair = pairs_of(rows, curves(alone))[0][0]
    times = {choice: by_order["together"] for choice, by_order in pair.together_us.items()}
    expected = times[SmSplit()] / min(times.values()) - 1.0
    assert regret(pair, SmSplit(), ("together",), "mean") == pytest.approx(expected)


def test_near_picks_are_no_hits() -> None:
    found = score("all", "rule", [[0.0], [0.005], [0.2], [0.0, 0.1]])
    assert (found.hits, found.near, found.max_regret) == (0.375, 0.625, 0.2)


def test_the_fixed_setting_is_the_best_of_its_pairs() -> None:
    """No other setting has less mean regret where it was chosen."""
    rows, alone = measured(noise=0.02)
    pairs = pairs_of(rows, curves(alone))[0]
    means = {c: sum(regret(pair, c, ORDERS, "mean") for pair in pairs) for c in TRIED}
    assert best_fixed(pairs, ORDERS, "mean") == min(means, key=means.__getitem__)


def command(*sources: Path, out: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "budget_rule.py"
    return subprocess.run(
        [sys.executable, str(script), *map(str, sources), "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def written(to: Path, *, world_size: int = 4) -> Path:
    """A measurement of the made-up machine as the suite `budget` writes it."""
    rows, alone = measured(noise=0.01)
    environment = Environment(
        device="cuda", gpu="NVIDIA H200", world_size=world_size, driver="1", torch="2", nccl="3", counterpoint="0",
        commit="abc", command=("measure",), date="2026-11-21", variables={},
    )  # fmt: skip
    record = Measurement(
        suite="budget", environment=environment, rounds=6, dropped_rounds=2, rows=tuple(rows), blocks=tuple(alone)
    )
    to.write_bytes(msgspec.json.encode(record))
    return to


def test_the_command_writes_json_and_table(tmp_path: Path) -> None:
    out = tmp_path / "out" / "rule.json"
    done = command(written(tmp_path / "pairs.json"), out=out)
    assert done.returncode == 0, done.stderr
    kept = json.loads(out.read_text())
    assert (kept["provenance"]["gpu"], len(kept["pairs"])) == ("NVIDIA H200", 5)
    assert out.with_suffix(".md").read_text().startswith("| pairs | policy | n | hits |")


def test_machines_are_not_mixed(tmp_path: Path) -> None:
    """Curves of 4 GPUs say nothing about pairs on 2."""
    both = written(tmp_path / "four.json"), written(tmp_path / "two.json", world_size=2)
    done = command(*both, out=tmp_path / "rule.json")
    assert (done.returncode, "different machines" in done.stderr) == (2, True)
