"""Check that driver, NCCL and torch fit together and support overlap, and that no environment variable prevents it.

NCCL's variables may also stand in /etc/nccl.conf, which the environment overrides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from counterpoint.doctor.readings import Readings, and_so_on, fine, not_seen, problem, warning
from counterpoint.machine.profile import Profile
from counterpoint.records.doctor import Check

NEEDED_TORCH = (2, 11)
NCCL_FEATURES = {  # feature: first version that has it (NCCL release notes)
    "min_ctas, max_ctas, cga_cluster_size": (2, 17),
    "window registration": (2, 27),
    "zero-CTA policy": (2, 28),
}
MOST_CONNECTIONS = 32
_FEW_CTAS = (
    "NCCL cannot fill the links: on 8 × H200 an all-gather of 1 GiB took 1.8 times as long with 8 CTAs as with 16"
)


def answers(readings: Readings) -> list[Check]:
    """Return a check `answers.PROBE` with status `problem` for every probe that hung, crashed or failed."""
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
        if not gpus or "cuda" in readings.failed:  # then the check `answers.cuda` reports it
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
    """Return the major and minor number of a version, as (2, 11) for 2.11.0+cu130; () if it has none."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text or "")
    return () if found is None else (int(found[1]), int(found[2]))


def nccl(readings: Readings) -> Check:
    """Check which NCCL torch would load, and which features this NCCL lacks."""
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
    """Check that torch, once imported, shows the driver's devices and has loaded the NCCL that check `nccl` found."""
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
    """Report whether GPUs offer NVLink multicast, never as a fault: NCCL may use it, counterpoint does not."""
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


class Rule(NamedTuple):
    """Describes one environment variable, and which of its values hurt overlap."""

    variable: str
    hurts: Callable[[str, Profile], bool]
    means: str
    fix: str = "unset it"
    breaks: bool = False  # whether a value that hurts is a problem; otherwise a warning


def _on(value: str, profile: Profile) -> bool:
    """Return whether the value switches an environment variable on (not empty, 0, false, no or off)."""
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _off(value: str, profile: Profile) -> bool:
    return value.strip() == "0"


def _few_ctas(value: str, profile: Profile) -> bool:
    """Return whether the value limits NCCL to fewer CTAs than it takes to fill the links."""
    number = _whole(value)
    return number is not None and 0 < number < profile.nccl.full_speed_ctas


def _whole(value: str) -> int | None:
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _local(value: str, profile: Profile) -> bool:
    """Return whether the value of a level variable is `LOC` or 0, which allows no direct access to a peer."""
    return value.strip().upper() in ("LOC", "0")


def _given(value: str, profile: Profile) -> bool:
    return bool(value.strip())


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("CUDA_LAUNCH_BLOCKING", _on,
         "the host waits for every kernel before it launches the next: nothing overlaps at all",
         "unset it; it is for debugging", breaks=True),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", lambda value, profile: _whole(value) == 1,
         "all streams share one hardware queue, so work starts in launch order: FSDP's all-gather waits behind "
         "compute. Recipes of tensor parallelism with its own overlap (Megatron) ask for 1",
         "unset it (8) unless such a recipe asks for it; never together with FSDP. It is read when CUDA starts"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", lambda value, profile: not 1 <= (_whole(value) or 0) <= MOST_CONNECTIONS,
         f"not a number from 1 to {MOST_CONNECTIONS}: the driver does not take it as you wrote it",
         f"unset it, or give a whole number from 1 to {MOST_CONNECTIONS}"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on,
         "wait() holds the host until the collective has ended: no compute is queued, and the GPU runs out of work",
         breaks=True),
    Rule("NCCL_BLOCKING_WAIT", _on,
         "the old name of TORCH_NCCL_BLOCKING_WAIT: wait() holds the host until the collective has ended",
         breaks=True),
    Rule("TORCH_NCCL_AVOID_RECORD_STREAMS", _off,
         "does nothing any more: torch 2.11 never calls record_stream for collectives, whatever it says"),
    Rule("NCCL_P2P_DISABLE", _on, "NCCL goes through host memory, not NVLink: collectives take many times as long",
         breaks=True),
    Rule("NCCL_P2P_LEVEL", _local, "NCCL goes through host memory, not NVLink: collectives take many times as long",
         "unset it, or NVL at the least", breaks=True),
    Rule("NCCL_SHM_DISABLE", _on, "pairs without peer access talk over the network, even inside this machine"),
    Rule("NCCL_MAX_CTAS", _few_ctas, _FEW_CTAS, "unset it, and limit per group"),
    Rule("NCCL_MAX_NCHANNELS", _few_ctas, _FEW_CTAS, "unset it, and limit per group"),
    Rule("NCCL_ALGO", _given, "NCCL no longer chooses by size and operation; what is forced suits some sizes only"),
    Rule("NCCL_PROTO", _given,
         "NCCL no longer chooses by size: LL wastes bandwidth on large messages, Simple is slow on small ones"),
    Rule("NCCL_CUMEM_ENABLE", _off,
         "no buffer becomes a symmetric window: no zero-CTA policy, no symmetric kernels, without a word"),
    Rule("NCCL_WIN_ENABLE", _off,
         "window registration is off: no zero-CTA policy, no symmetric kernels, without a word"),
    Rule("NCCL_LAUNCH_ORDER_IMPLICIT", _on,
         "operations of different communicators start in the order in which the host issued them: an FSDP "
         "collective that is ready waits for a tensor-parallel one that is not",
         "unset it unless communicators run at once and deadlock without it"),
    Rule("NCCL_IB_DISABLE", _on,
         "between machines NCCL uses TCP sockets: CPU time and host copies, a fraction of the bandwidth"),
    Rule("NCCL_NET_GDR_LEVEL", _local, "GPUDirect is off: traffic to other machines is copied through host memory"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _on,
         "every allocation is a cudaMalloc and every free a cudaFree, which waits for the whole device",
         "unset it; it is for memory checkers", breaks=True),
    Rule("PYTORCH_CUDA_ALLOC_CONF", lambda value, profile: "cudamallocasync" in value.lower(),
         "cudaMallocAsync has no memory pools: NCCL's registered and symmetric buffers are unavailable",
         "take backend:cudaMallocAsync out of it; expandable_segments:True is the usual cure for fragmentation"),
)
# fmt: on


def environment(readings: Readings, profile: Profile) -> list[Check]:
    """Return a check `environment.NAME` per variable whose value hurts overlap; if none does, a check `environment`."""
    conf = readings.system.nccl_conf if readings.system else {}
    values = conf | readings.environment
    found = []
    for rule in RULES:
        value = values.get(rule.variable)
        if value is not None and rule.hurts(value, profile):
            where = "" if rule.variable in readings.environment else " in /etc/nccl.conf"
            make = problem if rule.breaks else warning
            name, seen = f"environment.{rule.variable}", f"{rule.variable}={value}{where}"
            found.append(make(name, seen, means=rule.means, fix=rule.fix, value=value))
    watched = len({rule.variable for rule in RULES})
    return found or [fine("environment", f"none of {watched} variables that hurt is set", set=len(values))]
