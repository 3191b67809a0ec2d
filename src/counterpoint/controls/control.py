"""Define what every control does: say why it cannot work here, act on compute and collective, verify its effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from counterpoint.errors import Unsupported
from counterpoint.machine.driver import call_bindings
from counterpoint.records.measurement import Evidence, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Holds the streams and launch functions of compute and collective; a control returns a copy with some replaced.

    `compute` and `comm` queue one trial of compute or of the collective on the current stream and return at once.
    """

    compute_stream: Any  # torch.cuda.Stream
    comm_stream: Any
    compute: Callable[[], None]
    comm: Callable[[], None]


class Control(ABC):
    """Represents one way to share a GPU, with its setting; subclasses are frozen keyword-only dataclasses."""

    remedy: ClassVar[str]
    """What a user can do if the control did nothing, for the text of `NoEffect`."""

    by_cluster: ClassVar[bool] = False
    """Whether `verify` needs the cluster sizes of kernels, which only a captured graph shows."""

    setting: ClassVar[str]
    """The control as it is written in a mechanism's name, with its fields in braces: `gemm_sms={num_sms}`."""

    driver_calls: ClassVar[tuple[str, ...]] = ()
    """The functions of the CUDA driver that it needs."""

    nccl_options: ClassVar[tuple[str, ...]] = ()
    """The fields of NCCL's communicator configuration that it needs."""

    @property
    def name(self) -> str:
        """Return the setting as it is written in a mechanism's name: `gemm_sms=108`."""
        return self.setting.format_map(vars(self))

    def available(self) -> str | None:
        """Return why the control cannot work with this machine, torch or NCCL, None if it can; never raise."""
        calls = no_driver_calls(*self.driver_calls) if self.driver_calls else None
        return first_reason(no_gpu(), calls, *map(no_nccl_option, self.nccl_options))

    @abstractmethod
    def verify(self, seen: Observation) -> Evidence:
        """Return whether the control took effect, judged by the kernels that ran and never by the request."""

    def configure(self, options: Any) -> None:  # noqa: B027  most controls do not
        """Set fields of `torch.distributed.ProcessGroupNCCL.Options` before the process group is made."""

    def evidence(self, *, asked: str, seen: str, took_effect: bool) -> Evidence:
        """Return the evidence of `verify`, under the name of this control."""
        return Evidence(control=self.name, asked=asked, seen=seen, took_effect=took_effect)

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Yield the streams (`Lanes`) with this control on; on exit turn the control off."""
        yield lanes


@contextmanager
def applied(controls: Sequence[Control], lanes: Lanes) -> Iterator[Lanes]:
    """Yield the streams (`Lanes`) with all controls on, applied in their order; on exit turn the controls off."""
    with ExitStack() as stack:
        for control in controls:
            lanes = stack.enter_context(control.apply(lanes))
        yield lanes


def no_gpu() -> str | None:
    """Return why torch cannot use a GPU in this process; None if it can."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed: pip install 'counterpoint[torch]'"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None


def no_driver_calls(*names: str) -> str | None:
    """Return why the driver's functions `names` cannot be called through cuda-bindings; None if they can."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-bindings is not installed: pip install 'counterpoint[torch]'"
    missing = [name for name in names if not hasattr(driver, name)]
    return f"cuda-bindings is too old: it lacks {', '.join(missing)}" if missing else None


def call_driver(name: str, *arguments: Any) -> Any:
    """Return the result of the driver's function `name`, called through cuda-bindings; see `call_bindings`."""
    from cuda.bindings import driver

    return call_bindings(driver, name, *arguments)


def no_nccl() -> str | None:
    """Return why NCCL cannot run in this process; None if it can."""
    reason = no_gpu()
    if reason is None:
        import torch.distributed

        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return f"PyTorch {torch.__version__} was built without NCCL"
    return reason


def no_nccl_option(field: str) -> str | None:
    """Return why `field` of NCCL's communicator configuration cannot be set for a group; None if it can."""
    reason = no_nccl()
    if reason is not None:
        return reason
    import torch

    if not hasattr(nccl_config(torch.distributed.ProcessGroupNCCL.Options()), field):
        return f"PyTorch {torch.__version__} does not pass {field} on to NCCL {torch.cuda.nccl.version()}"
    return None


def nccl_config(options: Any) -> Any:
    """Return NCCL's communicator configuration in `ProcessGroupNCCL.Options`; None if this torch hides it."""
    return getattr(options, "config", None)


def why_unsupported(find: Callable[[], object]) -> str | None:
    """Return the text of the `Unsupported` that `find` raises; None if it raises none."""
    try:
        find()
    except Unsupported as error:
        return str(error)
    return None


def first_reason(*reasons: str | None) -> str | None:
    """Return the first reason that is not None; None if there is no reason."""
    return next((reason for reason in reasons if reason is not None), None)
