"""Another tenant on a GPU: multiplies matrices for a fraction of the time until its standard input closes.

Without MPS two processes share a GPU by time slices, so the other process's kernels take longer, by chance and a lot:
what a GPU that is slow, hot or shared looks like in a trace. Started by faults.py:

    python examples/busy_neighbour.py --gpu 2 --busy 0.5
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

import torch


def main() -> None:
    """Multiply until the input closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=int, required=True)
    parser.add_argument("--busy", type=float, default=0.5, help="fraction of the time that it keeps the GPU busy")
    parser.add_argument("--period-ms", type=float, default=10.0)
    args = parser.parse_args()

    torch.cuda.set_device(args.gpu)
    left = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    closed = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    torch.mm(left, right)
    torch.cuda.synchronize()
    print("ready", flush=True)
    while not closed.is_set():
        started = time.perf_counter()
        while time.perf_counter() - started < args.busy * args.period_ms / 1e3:
            for _ in range(8):
                torch.mm(left, right)
            torch.cuda.synchronize()
        time.sleep((1 - args.busy) * args.period_ms / 1e3)


if __name__ == "__main__":
    main()
