"""The table of operators: by lost time, at 80 columns, and honest about what it leaves out."""

import io

import msgspec
from rich.console import Console

from counterpoint.records.diagnosis import Diagnosis, OperatorChange
from counterpoint.records.operators import CardRates, KernelTime, OperatorTime
from counterpoint.rendering.operator_tables import operator_changes_table, operators_table
from counterpoint.rendering.print_table import print_table
from counterpoint.rendering.table import Table
from tests.support.example_diagnosis import HOSTILE

KERNEL = KernelTime(name="void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>", count=1.0, us=2_000.0)
ROWS = (
    OperatorTime(operator="aten::_fused_adamw_", calls=1.0, us=12_000.0),
    OperatorTime(operator="aten::mm", shapes="4096x4096, 4096x4096", phase="backward", calls=8.0, us=6_000.0,
                 tflops=660.4, gb_per_s=486.0, of_card=0.7, lost_us=1_800.0),
    OperatorTime(operator=None, calls=1.0, us=2_000.0, gb_per_s=0.0123, of_card=0.5, lost_us=1_000.0,
                 kernels=(KERNEL,)),
    OperatorTime(operator=HOSTILE, calls=1.0, us=1_000.0),
)  # fmt: skip
CARD = CardRates(gpu="H200", source="data sheet", tflops={"bf16": 989.4}, gb_per_s=4800.0)


def table(diagnosis: Diagnosis, *, card: CardRates | None = CARD, most: int = 9) -> Table:
    made = operators_table(msgspec.structs.replace(diagnosis, operators=ROWS, card=card), most)
    assert made is not None
    return made


def printed(made: Table) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_table(made, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_most_lost_time_comes_first_and_unknown_rates_last(training: Diagnosis) -> None:
    times = [line[4] for line in table(training).lines()]
    assert times == ["6.00", "2.00", "12.00", "1.00"]


def test_a_kernel_stands_for_an_operator_that_the_trace_lacks(training: Diagnosis) -> None:
    assert table(training).lines()[1][0] == "cunn_SoftMaxForward<4>"


def test_what_is_left_out_and_what_is_not_known_is_said(training: Diagnosis) -> None:
    assert table(training, most=2).notes == [
        "2 more take 13.00 ms.",
        "Together 21.00 ms.",
        "The card's rates (H200, data sheet): bf16 989 TFLOP/s, 4,800 GB/s.",
        "Of 13.00 ms the rate is not known.",
    ]


def test_without_a_card_nothing_is_held_against_one(training: Diagnosis) -> None:
    made = table(training, card=None)
    assert not {"of card", "lost"} & {column.name for column in made.columns}
    assert made.notes == ["Together 21.00 ms."]


def test_it_fits_80_columns_and_escapes_names(training: Diagnosis) -> None:
    text = printed(table(training))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b[31m" not in text
    assert "0.012" in text


def test_no_operators_no_table(training: Diagnosis) -> None:
    assert operators_table(msgspec.structs.replace(training, operators=()), 9) is None


def test_changes_name_operator_and_kernel() -> None:
    change = OperatorChange(name="aten::mm", kernel="gemm", before_us=2_000.0, now_us=None, change_us=-2_000.0)
    assert operator_changes_table([change], 9).lines() == [["aten::mm", "gemm", "2.00", "–", "-2.00"]]
