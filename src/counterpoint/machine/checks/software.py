"""Check that driver, NCCL and torch fit together and have what overlap needs."""

from __future__ import annotations

import re

from counterpoint.machine.checks.verdict import and_so_on, fine, not_seen, problem, warning
from counterpoint.machine.readings import Readings
from counterpoint.records.machine import Check

__all__ = ["SOFTWARE_CHECKS", "answers", "torch_runtime"]

NEEDED_TORCH = (2, 11)
NCCL_FEATURES = {  # feature: first version that has it (NCCL release notes)
    "min_ctas, max_ctas, cga_cluster_size": (2, 17),
    "window registration": (2, 27),
    "zero-CTA policy": (2, 28),
}


def answers(readings: Readings) -> list[Check]:
    """Return a problem, named `answers.PROBE`, for every probe that hung, crashed or failed."""
    return [
        problem(
            f"answers.{probe}", readings.unavailable.get(probe, "it failed"),
            means="jobs will meet the same: ranks crash, or hang in their first collective",
            fix="CUDA error 802: start nvidia-fabricmanager; 803 or 804: the libcuda in the container does not fit the "
            "kernel's driver; a version mismatch: the driver was updated under way, reboot; else "
            "dmesg | grep -i -e xid -e nvrm, drain and reboot the node",
        )
        for probe in readings.failed
    ]  # fmt: skip


def driver(readings: Readings) -> Check:
    """Check that CUDA starts and is new enough for torch."""
    gpus = readings.gpus
    if readings.cuda is None:
        reason = readings.unavailable.get("cuda", "CUDA was not asked")
        if not gpus or "cuda" in readings.failed:  # then `answers.cuda` says it
            return not_seen("driver", reason)
        return problem(
            "driver", f"NVML shows {len(gpus)} GPUs and CUDA cannot be asked: {reason}",
            means="no GPU can be used at all",
            fix="in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; else reinstall the driver",
        )  # fmt: skip
    supported = (readings.cuda.version // 1000, readings.cuda.version % 1000 // 10)
    text = f"{readings.nvml.driver}, " if readings.nvml and readings.nvml.driver else ""
    text += f"CUDA {supported[0]}.{supported[1]}"
    built = _numbers(readings.software.torch_cuda) if readings.software else ()
    if built and built[0] > supported[0]:
        return problem(
            "driver", f"{text}; torch was built with CUDA {readings.software.torch_cuda if readings.software else ''}",
            means="torch does not start on these GPUs",
            fix=f"update the driver, or install a torch built with CUDA {supported[0]}",
        )  # fmt: skip
    return fine("driver", text, cuda=f"{supported[0]}.{supported[1]}")


def _numbers(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 11) of 2.11.0+cu130."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text or "")
    return () if found is None else (int(found[1]), int(found[2]))


def nccl(readings: Readings) -> Check:
    """Check which NCCL torch would load, and what it lacks."""
    found = readings.nccl
    if found is None:
        return not_seen("nccl", readings.unavailable.get("nccl", "NCCL was not looked for"))
    version = ".".join(map(str, found.version))
    lacking = [name for name, since in NCCL_FEATURES.items() if found.version[:2] < since]
    if found.version[:2] >= (2, 27) and not found.has_window_register:
        lacking.append("window registration (built without it)")
    seen = f"{version}, by {found.found_by}: {found.path}"
    if not lacking:
        return fine("nccl", f"{seen}; has {and_so_on(NCCL_FEATURES)}", version=version, path=found.path)
    return warning(
        "nccl", f"{seen}; lacks {and_so_on(lacking)}", version=version, path=found.path,
        means="NCCL cannot be told to leave SMs to compute by these means; controls that need them are unavailable",
        fix="install NCCL 2.28 or later: a newer torch, or pip install -U nvidia-nccl-cu13",
    )  # fmt: skip


def torch(readings: Readings) -> Check:
    """Check that torch is built with CUDA, new enough, and has the features that counterpoint uses."""
    found = readings.software
    if found is None or found.torch is None:
        return not_seen("torch", "torch is not installed for this Python; measure, tune and the library need it")
    backend = (
        f"CUDA {found.torch_cuda}" if found.torch_cuda else f"ROCm {found.torch_hip}" if found.torch_hip else "CPU"
    )
    seen = f"{found.torch} for {backend}"
    gpus = readings.gpus
    if gpus and backend == "CPU":
        return problem(
            "torch", seen, version=found.torch, means="torch does not use the GPUs of this machine",
            fix="install a build with CUDA: pytorch.org/get-started",
        )  # fmt: skip
    if _numbers(found.torch) < NEEDED_TORCH:
        return problem(
            "torch", seen, version=found.torch,
            means="the public hooks by which FSDP's collectives are replaced are missing",
            fix="install torch 2.11 or later",
        )  # fmt: skip
    lacking = [name for name, there in found.features.items() if not there]
    if lacking:
        return warning(
            "torch", f"{seen}; lacks {and_so_on(lacking)}", version=found.torch,
            means="the mechanisms built on these are unavailable",
            fix="install an official build of torch 2.11 or later",
        )  # fmt: skip
    return fine("torch", f"{seen}; has {and_so_on(found.features)}", version=found.torch)


def torch_runtime(readings: Readings) -> Check:
    """Compare what torch really loaded with what its files promised (`--device-checks`)."""
    found = readings.torch_runtime
    if found is None:
        return not_seen("torch_runtime", readings.unavailable.get("torch", "not asked for (--device-checks)"))
    devices = len(readings.devices)
    version = ".".join(map(str, found.nccl_version or ()))
    seen = f"{found.device_count} devices, NCCL {version or 'none'}"
    if found.device_count != devices:
        return problem(
            "torch_runtime", f"{seen}; the driver shows {devices}", devices=found.device_count,
            means="torch does not use all GPUs", fix="python -c 'import torch; torch.cuda.init()' says why",
        )  # fmt: skip
    if found.nccl_path and readings.nccl and found.nccl_path != readings.nccl.path:
        return warning(
            "torch_runtime", f"{seen} from {found.nccl_path}, not from {readings.nccl.path}", devices=devices,
            means="what the check nccl says is about another library",
            fix="look for a second NCCL in LD_LIBRARY_PATH, LD_PRELOAD and site-packages; keep one",
        )  # fmt: skip
    return fine("torch_runtime", seen, devices=devices)


def multicast(readings: Readings) -> Check:
    """Report NVLink multicast, which is never needed and so never a fault; NCCL's figures differ with it."""
    if not readings.devices:
        return not_seen("multicast", readings.why_no_device())
    offered = all(device.multicast for device in readings.devices)
    set_to = readings.environment.get("NCCL_NVLS_ENABLE", readings.system.nccl_conf.get("NCCL_NVLS_ENABLE", "")
                                      if readings.system else "")  # fmt: skip
    switch = f"off in NCCL (NCCL_NVLS_ENABLE={set_to})" if set_to == "0" else "left to NCCL"
    means = "counterpoint does not use it; with it NCCL reduces in the switch and takes fewer SMs"
    return fine(
        "multicast", f"{'offered' if offered else 'not offered'} by the GPUs, {switch}", means, offered=int(offered)
    )


SOFTWARE_CHECKS = (driver, nccl, torch, multicast)
