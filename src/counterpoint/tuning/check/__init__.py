"""Prove from traces that copy engines moved communication, or that a tuning took effect: `counterpoint doctor --check`.

api.py      `check`: what all ranks show, knob by knob
knobs.py    what one rank's trace says about one knob
calls.py    which calls a trace holds: of each pair of a tuning, by copy engines, by NCCL

The record is in `records/doctor.py`.
"""
