"""What a Kineto file says beside its events: rank, job, GPU. What is not as it should be counts as unknown."""

from __future__ import annotations

from typing import Any

from counterpoint.trace.timeline import Device

__all__ = ["base_ns", "device_of", "distributed_info", "job_of", "whole"]


def distributed_info(header: dict[str, Any]) -> dict[str, Any]:
    """rank, world_size, backend, nccl_version, ... as c10d stated them; empty where it did not."""
    info = header.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def whole(value: Any) -> int | None:
    """`value` if it is a whole number from 0 that 64 bits hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def base_ns(header: dict[str, Any]) -> int:
    """What `ts` counts from, in ns since 1970; 0 before 2024."""
    return whole(header.get("baseTimeNanoseconds")) or 0


def job_of(info: dict[str, Any]) -> dict[str, Any]:
    """What every rank of a job states alike."""
    keys = ("backend", "nccl_version", "world_size")
    return {key: info[key] for key in keys if isinstance(info.get(key), (str, int))}


def device_of(header: dict[str, Any], device: int) -> Device:
    """Properties of GPU `device`, or of the first that is listed."""
    listed = header.get("deviceProperties")
    found = [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    props = next((d for d in found if d.get("id") == device), found[0] if found else {})
    name, major, minor = props.get("name"), whole(props.get("computeMajor")), whole(props.get("computeMinor"))
    return Device(
        name=name if isinstance(name, str) else None,
        num_sms=whole(props.get("numSms")) or None,
        regs_per_sm=whole(props.get("regsPerMultiprocessor")) or None,
        smem_per_sm=whole(props.get("sharedMemPerMultiprocessor") or props.get("maxSharedMemoryPerMultiProcessor"))
        or None,
        threads_per_sm=whole(props.get("maxThreadsPerMultiprocessor")) or None,
        compute_capability=None if major is None or minor is None else (major, minor),
    )
