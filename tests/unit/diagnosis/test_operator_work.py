"""FLOPs and bytes of an operator follow from its inputs, and agree with formulas that PyTorch keeps for itself."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from torch.utils import flop_counter as torch_counts

from counterpoint.diagnosis.reading.operator_work import OperatorWork, inputs_in_words, operator_work
from counterpoint.trace.timeline import OperatorInputs

BF16 = "c10::BFloat16"
QKV = [[2, 4, 128, 64], [2, 4, 96, 64], [2, 4, 96, 64]]
CAUSAL = [[2, 4, 128, 64]] * 3


def work(name: str, shapes: Sequence[Any], values: Sequence[str] = (), dtype: str = BF16) -> OperatorWork:
    types = [dtype if shape else "Scalar" for shape in shapes]
    stated = (json.dumps(part, separators=(",", ":")) for part in (shapes, types, list(values)))
    return operator_work(f"aten::{name}", OperatorInputs(*stated))


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("mm", [[64, 96], [96, 32]], torch_counts.mm_flop([64, 96], [96, 32])),
        ("mm", [[64, 64], [64, 64]], 2 * 64**3),
        ("addmm", [[64], [48, 32], [32, 64]], torch_counts.addmm_flop([64], [48, 32], [32, 64])),
        ("addmm", [[64, 64], [64, 64], [64, 64]], 2 * 64**3),
        ("bmm", [[5, 64, 96], [5, 96, 32]], torch_counts.bmm_flop([5, 64, 96], [5, 96, 32])),
        ("baddbmm", [[5, 64, 32], [5, 64, 96], [5, 96, 32]], torch_counts.bmm_flop([5, 64, 96], [5, 96, 32])),
        ("linear", [[4, 8, 96], [40, 96], [40]], 2 * 32 * 96 * 40),
    ],
)
def test_products_count_two_per_multiplication(name: str, shapes: list[list[int]], flops: int) -> None:
    assert work(name, shapes).flops == flops


def test_a_product_reads_its_factors_and_writes_its_result_once() -> None:
    assert work("mm", [[64, 96], [96, 32]]).bytes == 2 * (64 * 96 + 96 * 32 + 64 * 32)


CONVOLUTION = [[2, 6, 17, 19], [8, 3, 3, 5], [8]]
OUT = [2, 8, 8, 10]  # (17 + 2 - 4 - 1) // 2 + 1 and (19 + 4 - 4 - 1) // 2 + 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("convolution", ["", "", "", "[2, 2]", "[1, 2]", "[2, 1]", "False", "[0, 0]", "2"]),
        ("conv2d", ["", "", "", "[2, 2]", "[1, 2]", "[2, 1]", "2"]),
        ("miopen_convolution", ["", "", "", "[1, 2]", "[2, 2]", "[2, 1]", "2", "False", "False"]),
    ],
)
def test_convolutions_sum_over_the_channels_of_a_group(name: str, values: list[str]) -> None:
    shapes = CONVOLUTION + [[]] * (len(values) - 3)
    assert work(name, shapes, values).flops == torch_counts.conv_flop_count(CONVOLUTION[0], CONVOLUTION[1], OUT)


def test_a_transposed_convolution_multiplies_each_input_element() -> None:
    """PyTorch counts it the same way, by the shape of the output that the shapes here leave open."""
    values = ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"]
    counted = torch_counts.conv_flop_count([2, 6, 7, 9], [6, 8, 3, 3], [2, 8, 15, 19], transposed=True)
    assert work("convolution", [[2, 6, 7, 9], [6, 8, 3, 3], *[[]] * 7], values).flops == counted


@pytest.mark.parametrize(("mask", "gradients"), [("[True, True, False]", 2), ("[False, True, False]", 1)])
def test_convolution_backward_counts_the_gradients_asked_for(mask: str, gradients: int) -> None:
    """Each costs as much as forward: the first layer needs no gradient of its input."""
    values = ["", "", "", "[8]", "[2, 2]", "[1, 2]", "[2, 1]", "False", "[0, 0]", "2", mask]
    found = work("convolution_backward", [OUT, *CONVOLUTION[:2], *[[]] * 8], values)
    assert found.flops == gradients * torch_counts.conv_flop_count(CONVOLUTION[0], CONVOLUTION[1], OUT)


FORWARD = torch_counts.sdpa_flop_count(*QKV)
BACKWARD = torch_counts.sdpa_backward_flop_count(QKV[0], *QKV)


@pytest.mark.parametrize(
    ("name", "shapes", "values", "flops"),
    [
        ("scaled_dot_product_attention", QKV, ["", "", "", "", "0.", "False"], FORWARD),
        ("_scaled_dot_product_flash_attention", QKV, ["", "", "", "0.", "False"], FORWARD),
        ("_cudnn_attention_forward", QKV, [*[""] * 8, "True", "0.", "False"], FORWARD),
        ("_flash_attention_forward", [[s[0], s[2], s[1], s[3]] for s in QKV], [*[""] * 8, "False"], FORWARD),
        ("_scaled_dot_product_flash_attention_backward", [QKV[0], *QKV], [*[""] * 11, "False"], BACKWARD),
        ("_cudnn_attention_backward", [QKV[0], *QKV], [*[""] * 14, "False"], BACKWARD),
        ("_efficient_attention_backward", [[s[0], s[2], s[1], s[3]] for s in (QKV[0], *QKV)], [*[""] * 14, "0"],
         BACKWARD),
    ],
)  # fmt: skip
def test_attention_counts_two_products_forward_and_five_backward(
    name: str, shapes: list[list[int]], values: list[str], flops: int
) -> None:
    shapes = shapes + [[]] * (len(values) - len(shapes))
    assert work(name, shapes, values).flops == flops


def test_a_causal_mask_leaves_the_pairs_that_fused_kernels_compute() -> None:
    """128 queries see 1, 2, ..., 128 keys."""
    full, masked = (
        work("_scaled_dot_product_flash_attention", [*CAUSAL, [], []], ["", "", "", "0.", flag]).flops
        for flag in ("False", "True")
    )
    assert full is not None
    assert masked == full * (128 * 129 / 2) / 128**2


def test_packed_sequences_are_not_guessed() -> None:
    """The trace has their total length, not the length of each."""
    lengths = [[[1, 512, 4, 64]] * 3, [[5], [5]]]
    assert work("_flash_attention_forward", [*lengths[0], *lengths[1], *[[]] * 4], [*[""] * 8, "True"]).flops is None


@pytest.mark.parametrize(
    ("name", "shapes", "moved"),
    [
        ("add", [[64, 32], [64, 32], []], 3 * 64 * 32),
        ("mul", [[64, 32], [32]], 2 * 64 * 32 + 32),
        ("add_", [[64, 32], [64, 32]], 3 * 64 * 32),
        ("copy_", [[64, 32], [64, 32]], 2 * 64 * 32),
        ("sum", [[64, 32]], 64 * 32),
    ],
)
def test_memory_bound_operators_move_inputs_and_output(name: str, shapes: list[Any], moved: int) -> None:
    assert work(name, shapes) == OperatorWork(bytes=2 * moved, dtype="bfloat16")


@pytest.mark.parametrize("name", ["cat", "embedding", "index_select", "_foreach_add_"])
def test_work_that_shapes_do_not_tell_is_unknown(name: str) -> None:
    assert work(name, [[[64, 32], [64, 32]], []]).bytes is None


@pytest.mark.parametrize("text", ["", "null", "[[1,2]", '[["a"],{}]', "[[-1,2],[2,3]]", "[" * 70_000])
def test_hostile_inputs_are_unknown(text: str) -> None:
    for name in ("mm", "conv2d", "convolution_backward", "_cudnn_attention_backward", "add_"):
        assert operator_work(f"aten::{name}", OperatorInputs(text, text, text)).flops is None


def test_inputs_in_words() -> None:
    stated = OperatorInputs("[[4,8],[[2],[3]],[],[8]]", f'["{BF16}","TensorList","Scalar","float"]', "")
    assert inputs_in_words(stated) == ("4x8, 2 tensors, 8", "bfloat16, float32")
