"""Define the records of operators: their GPU time, their rates, and the rates of the card."""

from __future__ import annotations

from counterpoint.records import Record


class CardRates(Record, frozen=True, kw_only=True):
    """Holds the TFLOP/s and GB/s that a GPU can reach, beside which the rates of operators are shown."""

    gpu: str
    source: str  # "data sheet", or the profile whose measured shares of the data sheet's peaks count
    tflops: dict[str, float]  # by precision of matrix products: bf16, fp16, fp8, tf32, fp32 (without tensor cores)
    gb_per_s: float | None


class KernelTime(Record, frozen=True, kw_only=True):
    """Holds how often an operator runs a kernel or copy, and for how many µs, per step and rank."""

    name: str
    count: float
    us: float


class OperatorTime(Record, frozen=True, kw_only=True):
    """Holds the GPU time of one operator with one set of inputs from one place, per step and rank, and its rates.

    `us` sums up the operator's kernels and copies, also where several run at once. `of_card` is its time at the card's
    rate / its time; `lost_us` is the rest of its time. Rates are null if the trace has no shapes and dtypes, if the
    output's size does not follow from them, or if the figure would be above the data sheet's, as where caches serve the
    bytes. On a CPU there are no kernels.
    """

    operator: str | None = None  # host operation that launched the kernels; null: not in the trace
    shapes: str | None = None  # of its tensors
    dtypes: str | None = None
    phase: str | None = None  # forward | backward | optimizer
    module: str | None = None  # in backward that of the forward operation; its numbers are `*`
    stack: str | None = None  # Python functions outside of PyTorch, innermost first
    calls: float
    us: float
    tflops: float | None = None
    gb_per_s: float | None = None
    of_card: float | None = None
    lost_us: float | None = None
    kernels: tuple[KernelTime, ...] = ()  # longest first
