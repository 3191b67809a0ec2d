"""Symmetric memory as tensors, on any device.

`pool.py` tensors whose memory is free again when the next call says so; `early_release.py` tensors whose peers are told
as soon as they die: it decides what happens when symmetric memory is freed while peers may write.
"""
