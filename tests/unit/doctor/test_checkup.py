"""Every check on made-up machines: silent on a healthy one, and each fault told by exactly its check."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from counterpoint.doctor.checkup import examine, exit_code
from counterpoint.doctor.readings import NvLink, PairRate, Readings
from counterpoint.records.doctor import Check, Checkup

replace = msgspec.structs.replace


def part(name: str, /, **changes: Any) -> Callable[[Readings], Readings]:
    """Change attributes of one part."""
    return lambda readings: replace(readings, **{name: replace(getattr(readings, name), **changes)})


def one(name: str, items: str, index: int, /, **changes: Any) -> Callable[[Readings], Readings]:
    """Change attributes of one item of a part, such as GPU 3."""

    def change(readings: Readings) -> Readings:
        found = list(getattr(getattr(readings, name), items))
        found[index] = replace(found[index], **changes)
        return part(name, **{items: tuple(found)})(readings)

    return change


def gpu(**changes: Any) -> Callable[[Readings], Readings]:
    return one("nvml", "gpus", 3, **changes)


def links(**changes: Any) -> Callable[[Readings], Readings]:
    """GPU 3 with one odd link."""
    healthy = NvLink(active=True, speed_mb_per_s=26562, replays=0, recoveries=0, crc_errors=0)
    return gpu(nvlinks=(replace(healthy, **changes), *(healthy,) * 17))


def variable(name: str, value: str) -> Callable[[Readings], Readings]:
    return lambda readings: replace(readings, environment=readings.environment | {name: value})


def wrong(checkup: Checkup) -> dict[str, str]:
    return {check.name: check.status for check in checkup.checks if check.status in ("problem", "warning")}


def named(checkup: Checkup, name: str) -> Check:
    return next(check for check in checkup.checks if check.name == name)


def no_links(readings: Readings) -> Readings:
    """PCIe cards behind one switch: no NVLink, no fabric, no NIC."""
    assert readings.nvml is not None
    gpus = tuple(replace(gpu, nvlinks=(), fabric=None) for gpu in readings.nvml.gpus)
    return part("system", rdma=())(part("nvml", gpus=gpus)(readings))


def test_on_a_healthy_machine_everything_is_seen_and_nothing_wrong(healthy: Readings) -> None:
    """Each by a check of its own name."""
    checks = examine(healthy, torch=True).checks
    assert [check.name for check in checks if check.status in ("problem", "warning", "not_seen")] == []
    assert len({check.name for check in checks}) == len(checks)


FAULTS: list[tuple[Callable[[Readings], Readings], str, str]] = [
    (gpu(name="NVIDIA H100 80GB HBM3"), "gpus", "warning"),
    (gpu(lost="GPU is lost"), "gpus", "problem"),
    (gpu(mig=True), "mig", "problem"),
    (gpu(compute_mode="exclusive_process"), "compute_mode", "warning"),
    (gpu(compute_mode="prohibited"), "compute_mode", "problem"),
    (gpu(clock_reasons=("hw_thermal_slowdown",)), "clocks", "problem"),
    (gpu(clock_reasons=("hw_power_brake", "gpu_idle")), "clocks", "problem"),
    (gpu(clock_reasons=("clocks_setting",)), "clocks", "warning"),
    (gpu(power_limit_w=500.0), "power_limit", "warning"),
    (gpu(ecc_uncorrected=1), "ecc", "problem"),
    (gpu(remap_pending=True), "row_remap", "problem"),
    (gpu(remap_failed=True), "row_remap", "problem"),
    (gpu(persistence=False), "persistence", "warning"),
    (gpu(processes=("python (4711)",)), "other_processes", "warning"),
    (part("cuda", no_peer_access=((0, 3), (3, 0))), "peer_access", "problem"),
    (one("cuda", "devices", 3, copy_engines=1), "copy_engines", "problem"),
    (one("cuda", "devices", 3, stream_memory_ops=False), "stream_memory_ops", "problem"),
    (gpu(fabric="in_progress"), "fabric", "problem"),
    (links(active=False), "nvlink", "problem"),
    (links(speed_mb_per_s=20000), "nvlink", "problem"),
    (links(recoveries=1), "nvlink", "warning"),
    (links(crc_errors=5000), "nvlink", "warning"),
    (gpu(pcie_width=8), "pcie", "warning"),
    (gpu(pcie_replays=20000), "pcie", "warning"),
    (gpu(pcie_generation=3, utilization_percent=90), "pcie", "warning"),
    (one("bandwidth", "pairs", 2, gb_per_s=340.0), "bandwidth", "warning"),
    (one("bandwidth", "pairs", 2, gb_per_s=24.0), "bandwidth", "problem"),
    (one("bandwidth", "rotation", 2, gb_per_s=190.0), "bandwidth", "warning"),
    (one("system", "rdma", 3, state="DOWN"), "nics", "warning"),
    (one("system", "rdma", 3, rate_gbit_per_s=200.0), "nics", "warning"),
    (one("system", "rdma", 3, firmware="28.36.1010"), "nics", "warning"),
    (one("system", "rdma", 3, link_layer="Ethernet", mtu=1500), "nics", "warning"),
    (part("system", modules=("nvidia",), open_driver=False), "gpudirect", "problem"),
    (part("system", gpu_iommu={"0000:10:00.0": "DMA-FQ"}), "iommu", "warning"),
    (part("system", acs_redirects=("0000:00:01.0",)), "iommu", "warning"),
    (part("cuda", version=12080), "driver", "problem"),
    (part("nccl", version=(2, 27, 5)), "nccl", "warning"),
    (part("nccl", has_window_register=False), "nccl", "warning"),
    (part("software", torch="2.9.1+cu130"), "torch", "problem"),
    (part("software", torch_cuda=None, torch="2.11.0+cpu"), "torch", "problem"),
    (part("software", features={"symmetric_memory": False}), "torch", "warning"),
    (part("torch_runtime", device_count=1), "torch_runtime", "problem"),
    (part("torch_runtime", nccl_path="/usr/lib/libnccl.so.2"), "torch_runtime", "warning"),
    (part("system", nccl_conf={"NCCL_P2P_DISABLE": "1"}), "environment.NCCL_P2P_DISABLE", "problem"),
]
VARIABLES = [
    ("CUDA_LAUNCH_BLOCKING", "1", "problem"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warning"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "64", "warning"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "one", "warning"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "problem"),
    ("NCCL_BLOCKING_WAIT", "true", "problem"),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "warning"),
    ("NCCL_P2P_DISABLE", "1", "problem"),
    ("NCCL_P2P_LEVEL", "LOC", "problem"),
    ("NCCL_SHM_DISABLE", "1", "warning"),
    ("NCCL_MAX_CTAS", "4", "warning"),
    ("NCCL_MAX_NCHANNELS", "8", "warning"),
    ("NCCL_ALGO", "Ring", "warning"),
    ("NCCL_PROTO", "LL", "warning"),
    ("NCCL_CUMEM_ENABLE", "0", "warning"),
    ("NCCL_WIN_ENABLE", "0", "warning"),
    ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "warning"),
    ("NCCL_IB_DISABLE", "1", "warning"),
    ("NCCL_NET_GDR_LEVEL", "LOC", "warning"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "problem"),
    ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "warning"),
]
FAULTS += [(variable(name, value), f"environment.{name}", status) for name, value, status in VARIABLES]


@pytest.mark.parametrize(
    ("fault", "name", "status"), FAULTS, ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(FAULTS)]
)
def test_a_fault_is_told_by_its_check_alone(
    healthy: Readings, fault: Callable[[Readings], Readings], name: str, status: str
) -> None:
    """With what it means and a fix."""
    checkup = examine(fault(healthy), torch=True)
    assert wrong(checkup) == {name: status}
    assert min(len(named(checkup, name).means), len(named(checkup, name).fix)) > 5


HARMLESS: dict[str, Callable[[Readings], Readings]] = {
    "an idle GPU lowers its PCIe generation": gpu(pcie_generation=1),
    "at the power cap under load": gpu(clock_reasons=("sw_power_cap",), utilization_percent=100),
    "a few CRC errors since the driver was loaded": links(crc_errors=12),
    "ECC switched off": gpu(ecc=False),
    "a spare port is down": one("system", "rdma", 3, state="DOWN", board="storage", rate_gbit_per_s=40.0),
    "a TCP interface with small packets": part("system", rdma=()),
    "DMA-BUF instead of nvidia_peermem": part("system", modules=("nvidia",)),
    "enough CTAs": variable("NCCL_MAX_CTAS", "16"),
    "expandable segments": variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    "variables switched off": variable("NCCL_P2P_DISABLE", "0"),
    "an older CUDA in torch than in the driver": part("software", torch_cuda="12.8"),
    # the IOMMU is in nobody's way
    "nothing goes over PCIe": lambda readings: part("system", rdma=(), gpu_iommu={"0000:10:00.0": "DMA"})(readings),
    "no torch": part("software", torch=None, torch_cuda=None, features={}),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_no_wolf_is_cried(healthy: Readings, change: Callable[[Readings], Readings]) -> None:
    assert wrong(examine(change(healthy))) == {}


def unanswered(part_: str, reason: str, *, failed: bool) -> Callable[[Readings], Readings]:
    return lambda found: replace(
        found, unavailable={part_: reason}, failed=(part_,) if failed else (), **{"bandwidth": None, part_: None}
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (no_links, {"nvlink": "warning"}),  # nothing to repair, and still ten times as much to hide
        # where peers talk over PCIe, half the lanes are half the bandwidth
        (lambda readings: no_links(gpu(pcie_width=8)(readings)), {"nvlink": "warning", "pcie": "problem"}),
        (unanswered("cuda", "no CUDA driver", failed=False), {"driver": "problem"}),  # GPUs that cannot be used
        (unanswered("cuda", "cuInit failed: (802)", failed=True), {"answers.cuda": "problem"}),
        # a driver that does not answer us will not answer a job
        (unanswered("bandwidth", "no answer within 60 s", failed=True), {"answers.bandwidth": "problem"}),
    ],
)
def test_what_is_not_there_is_told_once(
    healthy: Readings, change: Callable[[Readings], Readings], expected: dict[str, str]
) -> None:
    assert wrong(examine(change(healthy))) == expected


DENIED = part("nvml", denied_peers={"0-3": "chipset_not_supported"})
PAIRS = tuple(
    PairRate(source=a, target=b, gb_per_s=rate) for a, b, rate in ((0, 1, 390.0), (2, 5, 300.0), (5, 2, 250.0))
)


@pytest.mark.parametrize(
    ("change", "name", "seen"),
    [
        (lambda r: DENIED(part("cuda", no_peer_access=((0, 3),))(r)), "peer_access",
         "missing between 0 → 3 (NVML: chipset_not_supported)"),
        (part("bandwidth", pairs=PAIRS), "bandwidth",
         "3 pairs, best 0 → 1 390 GB/s, all at once 385; below 90%: 5 → 2 250; 2 → 5 300"),
        # CUDA_VISIBLE_DEVICES is no fault, and is said
        (lambda r: part("cuda", devices=r.cuda.devices[:2])(r), "gpus",
         "8 × NVIDIA H200, of which CUDA shows 2 to this process"),
        # the reason of the probe is the text of the checks that needed it
        (lambda r: replace(r, nvml=None, unavailable={"nvml": "no answer; the process was killed"}), "clocks",
         "no answer; the process was killed"),
    ],
)  # fmt: skip
def test_what_was_seen(healthy: Readings, change: Callable[[Any], Readings], name: str, seen: str) -> None:
    assert named(examine(change(healthy)), name).seen == seen


def test_nothing_seen_is_nothing_wrong() -> None:
    checkup = examine(Readings(host="laptop"), torch=True)
    assert {check.status for check in checkup.checks} == {"not_seen", "ok"}


def test_control_characters_from_outside_are_escaped(healthy: Readings) -> None:
    checkup = examine(one("system", "rdma", 3, device="mlx\x1b[2J", state="DOWN")(healthy))
    assert "\x1b" not in named(checkup, "nics").seen


@pytest.mark.parametrize(
    ("statuses", "strict", "code"),
    [("ok not_seen", False, 0), ("ok warning", False, 0), ("ok warning", True, 1), ("not_seen", True, 0),
     ("warning problem", False, 1)],
)  # fmt: skip
def test_exit_code(statuses: str, strict: bool, code: int) -> None:
    checks = tuple(Check(name="x", status=status, seen="") for status in statuses.split())  # type: ignore[arg-type]
    assert exit_code(checks, strict=strict) == code
