"""What a probe raises when it cannot look, or when what it looks at is broken."""

from __future__ import annotations

__all__ = ["Blind", "Broken"]


class Blind(Exception):
    """The probe cannot look; its text says what is missing."""


class Broken(Blind):
    """What should have answered failed; its text says how."""
