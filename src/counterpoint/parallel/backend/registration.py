"""Register backend `counterpoint` with torch.distributed.

Torch calls `register` at the end of every `import torch` (entry point `torch.backends` in pyproject.toml), so that
programs only name the backend. Nothing else is loaded until a group of this backend is made.
"""

from __future__ import annotations

from typing import Any

from counterpoint.parallel.backend import NAME


def register() -> None:
    """Register the backend; do nothing where torch was built without torch.distributed. Twice is once."""
    import torch.distributed as dist  # here: torch may not be installed, and it is half imported when it calls this

    if dist.is_available():
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])


def _group(options: Any, backend_options: Any) -> Any:
    """Return a new process group, as torch asks a backend for it."""
    from counterpoint.parallel.backend.group import CounterpointGroup

    return CounterpointGroup(options, backend_options)
