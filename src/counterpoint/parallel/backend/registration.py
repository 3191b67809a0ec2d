"""Register backend `counterpoint` with torch.distributed.

Torch calls `register` at the end of every `import torch` (entry point `torch.backends` in pyproject.toml), so that
programs only name the backend. Nothing else is loaded until a group of this backend is made.
"""

from __future__ import annotations

from typing import Any

from counterpoint.parallel.backend import NAME


def register() -> None:
    """Register the backend, if torch has torch.distributed; a second call has no effect."""
    import torch  # here: torch may not be installed, and it is half imported when it calls this
    import torch.distributed as dist

    if dist.is_available():
        devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]  # torch prefers one that is not the CPU
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=devices)


def _group(options: Any, backend_options: Any) -> Any:
    """Return a new `CounterpointGroup`, with the arguments that torch passes to a backend."""
    from counterpoint.parallel.backend.group import CounterpointGroup

    return CounterpointGroup(options, backend_options)
