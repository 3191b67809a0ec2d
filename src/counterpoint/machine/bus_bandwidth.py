"""Convert between algorithm and bus bandwidth of collectives, as nccl-tests define them."""

from __future__ import annotations

_SHARES = {  # of (n - 1) / n of the array that cross a GPU's links
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "gather": 1,
    "scatter": 1,
    "peer_copy": 1,  # copies that make up an operation of which a trace has no name
}


def bus_factor(operation: str, ranks: int) -> float:
    """Return the ratio of an operation's bus bandwidth to its algorithm bandwidth (bytes of the array / time).

    It is 2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather, reduce_scatter, all_to_all, gather and scatter, and
    1 for everything else (broadcast, reduce, send_recv). With one rank the first two factors are 0, as in nccl-tests:
    nothing crosses a link.
    """
    shares = _SHARES.get(operation)
    return 1.0 if shares is None else shares * (ranks - 1) / ranks


def bus_gb_per_s(operation: str, num_bytes: float, ranks: int, us: float) -> float:
    """Return the bus bandwidth in GB/s of an operation that takes `us` µs; `num_bytes` is the full array's size."""
    return num_bytes / us / 1000 * bus_factor(operation, ranks)
