"""What a control needs before it can work, each answered with the reason why not; nothing here ever raises."""

from __future__ import annotations

from typing import Any

__all__ = ["first_reason", "nccl_config", "no_driver_calls", "no_gpu", "no_nccl", "no_nccl_option"]


def no_gpu() -> str | None:
    """Why torch cannot use a GPU here."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed: pip install 'counterpoint[torch]'"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None


def no_driver_calls(*names: str) -> str | None:
    """Why the driver's functions `names` cannot be called through cuda-bindings."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-bindings is not installed: pip install 'counterpoint[torch]'"
    missing = [name for name in names if not hasattr(driver, name)]
    return f"cuda-bindings is too old: it lacks {', '.join(missing)}" if missing else None


def no_nccl() -> str | None:
    """Why NCCL cannot run here."""
    reason = no_gpu()
    if reason is None:
        import torch.distributed

        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return f"PyTorch {torch.__version__} was built without NCCL"
    return reason


def no_nccl_option(field: str) -> str | None:
    """Why a process group cannot be told `field` of NCCL's communicator configuration."""
    reason = no_nccl()
    if reason is not None:
        return reason
    import torch

    if not hasattr(nccl_config(torch.distributed.ProcessGroupNCCL.Options()), field):
        return f"PyTorch {torch.__version__} does not pass {field} on to NCCL {torch.cuda.nccl.version()}"
    return None


def nccl_config(options: Any) -> Any:
    """NCCL's communicator configuration in `ProcessGroupNCCL.Options`; None if this torch hides it."""
    return getattr(options, "config", None)


def first_reason(*reasons: str | None) -> str | None:
    """The first that is not None."""
    return next((reason for reason in reasons if reason is not None), None)
