"""Make tensors in symmetric memory on any device: `pool.py` for `empty`, `early_release.py` for early release.

Symmetric memory freed while peers may still write to it: `ReusePolicy` in `pool.py` says when it may be used again (CPU
at once; GPU `StreamOrder.freed` in `cuda/order.py`), `early_release.py` when peers are told that they may write it.
"""
