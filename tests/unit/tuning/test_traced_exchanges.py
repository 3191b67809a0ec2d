"""Exchanges of tokens in traces: planted layers of experts, and all_to_alls that are none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from counterpoint.records.tuning import StepPair
from counterpoint.tuning.from_trace import pairs_of_traces
from counterpoint.tuning.pairs import check_pair
from tests.support.kineto_trace import Event, annotation, header, launched, metadata, op, param_comms, write

TOKENS, EXPERTS, HIDDEN, TOP_K = 4096, 16, 512, 4
ROWS = TOKENS * TOP_K


class TracedLayers:
    """One rank's step, in which operations follow each other."""

    def __init__(self) -> None:
        self.events: list[Event] = [annotation("ProfilerStep#0", 0.0, 9_990.0)]
        self._numbers = count(1)

    def kernel(self, operation: str, kernel: str, dims: Any) -> TracedLayers:
        """An operation of these shapes, and the kernel that it launches."""
        number = next(self._numbers)
        self.events += [
            op(operation, 100.0 * number, 5.0, external=number, dims=dims),
            *launched(kernel, 100.0 * number + 1, 90.0, correlation=number, external=number, delay=0.0),
        ]
        return self

    def router(self, tokens: int = TOKENS, experts: int = EXPERTS) -> TracedLayers:
        """Logits of experts, and the best of them."""
        self.kernel("aten::mm", "nvjet_tst_64x8_NTT", [[tokens, HIDDEN], [HIDDEN, experts]])
        return self.kernel(
            "aten::topk", "void at::native::sbtopk::gatherTopK<float>(args)", [[tokens, experts], [], []]
        )

    def exchanged(self, sent: int, received: int, ranks: tuple[int, ...] = (0, 1)) -> TracedLayers:
        """An all_to_all of so many rows; the computation that waits for it."""
        number = next(self._numbers)
        said = metadata("all_to_allv", nelems=(sent * HIDDEN, received * HIDDEN), seq=number, ranks=ranks)
        self.events += [
            param_comms(100.0 * number, 4.0, external=number, more=said),
            *launched(
                "ncclDevKernel_SendRecv(args)", 100.0 * number + 1, 90.0, correlation=number, external=number,
                stream=20, grid=(24, 1, 1), delay=0.0, more=said,
            ),
        ]  # fmt: skip
        return self.kernel("aten::mm", "nvjet_tst_128x256_NTT", [[1024, 256], [256, 1024]])

    def pairs(self, folder: Path) -> tuple[tuple[StepPair, ...], tuple[str, ...]]:
        write(folder / "rank0.json", self.events, header())
        return pairs_of_traces(folder)


def test_dispatch_and_combine_are_one_exchange(tmp_path: Path) -> None:
    """Of two layers forward, and of their derivatives backward; sizes are those of router, topk and bytes sent."""
    layers = TracedLayers().router()
    for received in (ROWS + 900, ROWS - 40):
        layers.exchanged(ROWS, received).exchanged(received, ROWS)  # forward
        layers.exchanged(ROWS, received).exchanged(received, ROWS)  # backward
    (found,), notes = layers.pairs(tmp_path)
    assert notes == ()
    assert found == StepPair(
        operation="exchange", compute="512x512x16x4 4096 uniform", bytes_per_rank=ROWS * HIDDEN * 2, ranks=2,
        dtype="bfloat16", calls=4,
    )  # fmt: skip
    check_pair(found)


def test_a_grouped_matmul_tells_the_width_of_experts(tmp_path: Path) -> None:
    """That of the product which has the tokens' columns again."""
    layers = TracedLayers().router().exchanged(ROWS, ROWS + 8)
    for width, columns in ((HIDDEN, 2 * 768), (768, HIDDEN)):
        layers.kernel("aten::_grouped_mm", "nvjet_grouped", [[ROWS + 8, width], [EXPERTS // 2, width, columns], [8]])
    (found,), _ = layers.exchanged(ROWS + 8, ROWS).pairs(tmp_path)
    assert found.compute == "512x768x16x4 4096 uniform"


def test_ranks_that_get_twice_as_many_tokens_are_uneven(tmp_path: Path) -> None:
    """Although what comes is a multiple of the tokens, too: the exchange is that of all calls."""
    layers = TracedLayers().router()
    for received in (2 * ROWS, ROWS // 2 + 3):
        layers.exchanged(ROWS, received).exchanged(received, ROWS)
    (found,), _ = layers.pairs(tmp_path)
    assert (found.compute, found.calls) == ("512x512x16x4 4096 zipf", 2)


def test_equal_parts_are_an_all_to_all(tmp_path: Path) -> None:
    """As of sequence parallelism, even if they are a multiple of the tokens of a layer of experts."""
    found, _ = TracedLayers().router().exchanged(ROWS, ROWS).exchanged(ROWS, ROWS).pairs(tmp_path)
    assert {pair.operation for pair in found} == {"all_to_all"}


UNKNOWN: dict[str, Callable[[TracedLayers], TracedLayers]] = {
    "nothing": lambda layers: layers,
    "topk without a matmul": lambda layers: layers.kernel("aten::topk", "gatherTopK", [[TOKENS, EXPERTS]]),
    "other tokens": lambda layers: layers.router(tokens=4095),
    "experts that ranks cannot share": lambda layers: layers.router(experts=15),
    "more choices than experts": lambda layers: layers.router(experts=2),
    "a topk of no lengths": lambda layers: layers.kernel(
        "aten::mm", "nvjet_tst_64x8_NTT", [[TOKENS, HIDDEN], [HIDDEN, EXPERTS]]
    ).kernel("aten::topk", "gatherTopK", [["a", {}], [1 << 70, EXPERTS], [[[]]], -1]),
    "a topk of very many tokens": lambda layers: layers.router(tokens=1 << 40),
}


@pytest.mark.parametrize("router", UNKNOWN.values(), ids=UNKNOWN)
def test_what_a_trace_does_not_tell_is_said(tmp_path: Path, router: Callable[[TracedLayers], TracedLayers]) -> None:
    """It stays an all_to_all, and a note has the line of pairs.toml that would tell it."""
    found, notes = router(TracedLayers()).exchanged(ROWS, ROWS + 64).exchanged(ROWS + 64, ROWS).pairs(tmp_path)
    assert {pair.operation for pair in found} <= {"all_to_all"}
    (said,) = [note for note in notes if "HIDDENxFFNxEXPERTSxTOP_K TOKENS zipf" in note]
    assert said.startswith("2 all_to_alls of a step have parts of unequal sizes")
