"""List the data sheets of GPUs: dense peaks (without sparsity), memory, and the limits of one SM.

Limits of an SM are from the CUDA programming guide, "compute capabilities". A GPU without memory figures can be
recognised in a trace, but not planned with.

Bus bandwidth is computed by one formula for measurements, traces, plans and the simulator:

    bus bandwidth = factor * bytes of the full array / time

The factor is from nccl-tests (its doc/PERFORMANCE.md, and the `getBw` of each of its tests), which makes the
figures of different operations and numbers of ranks comparable with the rate of one GPU's links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from counterpoint.machine.occupancy import SmLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSheet:
    """Holds the data sheet of one kind of GPU."""

    name: str  # the part of the driver's device name that identifies the GPU
    bf16_tflops: float  # dense peak of matrix products in bf16 and fp16 (fp16 alone on V100)
    sm: SmLimits  # its SMs and what each of them holds
    tf32_tflops: float | None = None  # dense peaks in tf32 and fp8; None: not in this table, or not supported
    fp8_tflops: float | None = None
    fp32_tflops: float | None = None  # peak in fp32 without tensor cores; None: not in this table
    memory_gib: float | None = None  # device memory, and its bandwidth; None: not in this table
    memory_gb_per_s: float | None = None
    link_gb_per_s: float | None = None  # NVLink or Infinity Fabric, each direction; None: none, or not all alike
    clock_ghz: float | None = None  # highest clock of the SMs, and the power limit as shipped; None: not in this table
    watts: float | None = None
    source: str = ""  # title of the data sheet

    @property
    def tflops(self) -> dict[str, float]:
        """Return the dense peaks of matrix products in TFLOP/s by precision; `fp32` is the peak of TF32."""
        peaks = {"bf16": self.bf16_tflops, "fp16": self.bf16_tflops, "fp32": self.tf32_tflops, "fp8": self.fp8_tflops}
        return {precision: peak for precision, peak in peaks.items() if peak is not None}


def _sms(num_sms: int, base: SmLimits) -> SmLimits:
    return replace(base, num_sms=num_sms)


HOPPER = SmLimits(num_sms=132, regs=65536, smem=233472, threads=2048)  # and Blackwell
AMPERE = SmLimits(num_sms=108, regs=65536, smem=167936, threads=2048)
SMALL = SmLimits(num_sms=84, regs=65536, smem=102400, threads=1536, blocks=16)  # compute capability 8.6
ADA = SmLimits(num_sms=142, regs=65536, smem=102400, threads=1536, blocks=24)
VOLTA = SmLimits(num_sms=80, regs=65536, smem=98304, threads=2048, smem_reserved=0)
CDNA = SmLimits(num_sms=304, regs=131072, smem=65536, threads=2048)

_OTHER_LINKS = re.compile(r"PCI|\bNVL\b|DGXS", re.IGNORECASE)  # cards with bridges between some of them, or nothing

GPUS: tuple[GpuSheet, ...] = (  # `find_gpu` takes the first whose `name` is part of the device name
    GpuSheet(
        name="GB300", bf16_tflops=2500.0, fp32_tflops=80.0, tf32_tflops=1250.0, fp8_tflops=5000.0, sm=_sms(148, HOPPER),
        link_gb_per_s=900.0, memory_gib=277.0, memory_gb_per_s=8000.0, source="NVIDIA GB300 NVL72 data sheet, per GPU",
    ),
    GpuSheet(
        name="B300", bf16_tflops=2250.0, fp32_tflops=75.0, tf32_tflops=1125.0, fp8_tflops=4500.0, sm=_sms(148, HOPPER),
        link_gb_per_s=900.0, memory_gib=268.0, memory_gb_per_s=8000.0,
        source="NVIDIA HGX B300 data sheet, per GPU; 288 GB are 268 GiB",
    ),
    GpuSheet(
        name="GB200", bf16_tflops=2500.0, fp32_tflops=80.0, tf32_tflops=1250.0, fp8_tflops=5000.0, sm=_sms(148, HOPPER),
        link_gb_per_s=900.0, memory_gib=186.0, memory_gb_per_s=8000.0, watts=1200.0,
        source="NVIDIA GB200 NVL72 data sheet, per GPU",
    ),
    GpuSheet(
        name="B200", bf16_tflops=2250.0, fp32_tflops=75.0, tf32_tflops=1125.0, fp8_tflops=4500.0, sm=_sms(148, HOPPER),
        link_gb_per_s=900.0, memory_gib=180.0, memory_gb_per_s=7700.0, clock_ghz=1.965, watts=1000.0,
        source="NVIDIA HGX B200 data sheet, per GPU",
    ),
    GpuSheet(name="GH200", bf16_tflops=989.4, fp32_tflops=67.0, sm=HOPPER),
    GpuSheet(
        name="H200", bf16_tflops=989.4, tf32_tflops=494.7, fp8_tflops=1978.9, sm=HOPPER, link_gb_per_s=450.0,
        fp32_tflops=67.0, memory_gib=141.0, memory_gb_per_s=4800.0, clock_ghz=1.98, watts=700.0,
        source="NVIDIA H200 data sheet, SXM",
    ),
    GpuSheet(
        name="H100 PCIe", bf16_tflops=756.5, tf32_tflops=378.0, fp8_tflops=1513.0, sm=_sms(114, HOPPER),
        fp32_tflops=51.0, memory_gib=80.0, memory_gb_per_s=2000.0, source="NVIDIA H100 data sheet, PCIe",
    ),
    GpuSheet(
        name="H100 NVL", bf16_tflops=835.5, fp32_tflops=60.0, tf32_tflops=417.5, fp8_tflops=1670.5, sm=HOPPER,
        memory_gib=94.0, memory_gb_per_s=3900.0, source="NVIDIA H100 data sheet, NVL",
    ),
    GpuSheet(
        name="H100", bf16_tflops=989.4, tf32_tflops=494.7, fp8_tflops=1978.9, sm=HOPPER, link_gb_per_s=450.0,
        fp32_tflops=67.0, memory_gib=80.0, memory_gb_per_s=3350.0, clock_ghz=1.98, watts=700.0,
        source="NVIDIA H100 data sheet, SXM5",
    ),
    GpuSheet(
        name="H800", bf16_tflops=989.4, tf32_tflops=494.7, fp8_tflops=1978.9, sm=HOPPER, link_gb_per_s=200.0,
        fp32_tflops=67.0, memory_gib=80.0, memory_gb_per_s=3350.0, clock_ghz=1.98, watts=700.0,
        source="as NVIDIA H100, SXM5, with 400 GB/s of NVLink",
    ),
    GpuSheet(
        name="H20", bf16_tflops=148.0, tf32_tflops=74.0, fp8_tflops=296.0, sm=_sms(78, HOPPER), link_gb_per_s=450.0,
        fp32_tflops=44.0, memory_gib=96.0, memory_gb_per_s=4000.0, source="NVIDIA H20 data sheet, SXM",
    ),
    GpuSheet(
        name="A100", bf16_tflops=312.0, fp32_tflops=19.5, tf32_tflops=156.0, sm=AMPERE, link_gb_per_s=300.0,
        memory_gib=80.0, memory_gb_per_s=2039.0, clock_ghz=1.41, watts=400.0,
        source="NVIDIA A100 data sheet, SXM4 80 GB",
    ),
    GpuSheet(
        name="A100-40", bf16_tflops=312.0, fp32_tflops=19.5, tf32_tflops=156.0, sm=AMPERE,
        memory_gib=40.0, memory_gb_per_s=1555.0, clock_ghz=1.41, watts=400.0,
        source="NVIDIA A100 data sheet, SXM4 40 GB",
    ),
    GpuSheet(
        name="A800", bf16_tflops=312.0, fp32_tflops=19.5, tf32_tflops=156.0, sm=AMPERE, link_gb_per_s=200.0,
        memory_gib=80.0, memory_gb_per_s=2039.0, clock_ghz=1.41, watts=400.0,
        source="NVIDIA A800 data sheet, SXM4 80 GB",
    ),
    GpuSheet(name="A40", bf16_tflops=149.7, fp32_tflops=37.4, sm=SMALL),
    GpuSheet(name="A10", bf16_tflops=125.0, fp32_tflops=31.2, sm=_sms(72, SMALL)),
    GpuSheet(
        name="L40S", bf16_tflops=362.0, fp32_tflops=91.6, tf32_tflops=183.0, fp8_tflops=733.0, sm=ADA,
        memory_gib=45.0, memory_gb_per_s=864.0, clock_ghz=2.52, watts=350.0,
        source="NVIDIA L40S data sheet; 48 GB less those of ECC",
    ),
    GpuSheet(name="L40", bf16_tflops=181.0, fp32_tflops=90.5, sm=ADA),
    GpuSheet(name="L4", bf16_tflops=121.0, fp32_tflops=30.3, sm=_sms(58, ADA)),
    GpuSheet(name="V100", bf16_tflops=125.0, fp32_tflops=15.7, sm=VOLTA, link_gb_per_s=150.0),
    GpuSheet(
        name="MI325X", bf16_tflops=1307.4, tf32_tflops=653.7, fp8_tflops=2614.9, sm=CDNA, link_gb_per_s=448.0,
        fp32_tflops=163.4,
        memory_gib=256.0, memory_gb_per_s=6000.0, clock_ghz=2.1, watts=1000.0, source="AMD Instinct MI325X data sheet",
    ),
    GpuSheet(
        name="MI300X", bf16_tflops=1307.4, tf32_tflops=653.7, fp8_tflops=2614.9, sm=CDNA, link_gb_per_s=448.0,
        fp32_tflops=163.4,
        memory_gib=192.0, memory_gb_per_s=5300.0, clock_ghz=2.1, watts=750.0, source="AMD Instinct MI300X data sheet",
    ),
    GpuSheet(name="MI250", bf16_tflops=191.5, fp32_tflops=23.9, sm=_sms(104, CDNA)),
)  # fmt: skip


def find_gpu(name: str | None) -> GpuSheet | None:
    """Return the data sheet whose name occurs in `name`, the driver's device name; None if there is none."""
    return next((gpu for gpu in GPUS if name and gpu.name in name), None)


def link_gb_per_s(name: str | None) -> float | None:
    """Return the GB/s of one GPU's links in each direction by its data sheet; None if that is not known."""
    gpu = find_gpu(name)
    return None if gpu is None or _OTHER_LINKS.search(name or "") else gpu.link_gb_per_s


def peak_tflops(name: str | None) -> float | None:
    """Return the dense bf16 peak in TFLOP/s (fp16 on V100); None for an unknown device."""
    gpu = find_gpu(name)
    return gpu.bf16_tflops if gpu else None
