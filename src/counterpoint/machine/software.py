"""Read what is installed from its files and metadata: no import of torch, no driver."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from counterpoint.machine.readings import Software

__all__ = ["read_software", "torch_files"]

PACKAGES = ("triton", "cuda-bindings", "nvidia-ml-py", "numpy")
_FEATURES = {  # feature: file below torch/, and what it must contain
    "symmetric_memory": ("distributed/_symmetric_memory/__init__.py", "def rendezvous"),
    "green_contexts": ("cuda/green_contexts.py", "class GreenContext"),
    "fsdp_custom_all_gather": ("distributed/fsdp/_fully_shard/_fully_shard.py", "def set_custom_all_gather"),
    "fsdp_custom_reduce_scatter": ("distributed/fsdp/_fully_shard/_fully_shard.py", "def set_custom_reduce_scatter"),
}
_ASSIGNED = re.compile(r"""^(__version__|cuda|hip)\b[^=\n]*= *["']([^"'\n]*)["']""", re.MULTILINE)


def read_software() -> Software:
    """torch and the packages beside it, of the Python that runs this."""
    spec = find_spec("torch")
    packages = {name: _version(name) for name in PACKAGES}
    if spec is None or spec.origin is None:
        return Software(packages=packages)
    return torch_files(Path(spec.origin).parent, packages)


def torch_files(folder: Path, packages: dict[str, str | None]) -> Software:
    """torch as its folder describes it: `version.py`, and the files that hold the features we use."""
    assigned = dict(_ASSIGNED.findall(_read(folder / "version.py")))
    features = {name: mark in _read(folder / path) for name, (path, mark) in _FEATURES.items()}
    return Software(
        torch=assigned.get("__version__"),
        torch_cuda=assigned.get("cuda"),
        torch_hip=assigned.get("hip"),
        features=features,
        packages=packages,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
