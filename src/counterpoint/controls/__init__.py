"""Knobs that share a GPU between computation and communication: one knob, one file, and each can prove itself."""
