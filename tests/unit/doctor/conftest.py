"""Made-up machines: a healthy node of 8 × H200, from which every test takes something away."""

from itertools import permutations

import pytest

from counterpoint.doctor.readings import (
    Bandwidth,
    Cuda,
    CudaDevice,
    GpuReading,
    InstalledTorch,
    Nccl,
    NetPort,
    NvLink,
    Nvml,
    PairRate,
    RdmaPort,
    Readings,
    System,
    TorchRuntime,
)

GPUS = 8


def gpu(index: int) -> GpuReading:
    return GpuReading(
        index=index,
        name="NVIDIA H200",
        mig=False,
        compute_mode="default",
        persistence=True,
        utilization_percent=0,
        clock_reasons=("gpu_idle",),
        sm_mhz=345,
        sm_mhz_max=1980,
        power_limit_w=700.0,
        power_limit_default_w=700.0,
        temperature_c=31,
        ecc=True,
        ecc_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        rows_remapped=0,
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        pcie_replays=3,
        nvlinks=(NvLink(active=True, speed_mb_per_s=26562, replays=0, recoveries=0, crc_errors=0),) * 18,
        fabric="completed",
        processes=(),
    )


def device(index: int) -> CudaDevice:
    return CudaDevice(
        name="NVIDIA H200", num_sms=132, copy_engines=3, stream_memory_ops=True, multicast=True, dma_buf=True
    )


def port(index: int) -> RdmaPort:
    return RdmaPort(
        device=f"mlx5_{index}", port="1", link_layer="InfiniBand", state="ACTIVE", rate_gbit_per_s=400.0,
        firmware="28.39.1002", board="MT_0000000838", mtu=2044,
    )  # fmt: skip


@pytest.fixture
def healthy() -> Readings:
    pairs = [pair for pair in permutations(range(GPUS), 2) if sum(pair) % 3 == 0]
    return Readings(
        host="node-1",
        nvml=Nvml(driver="580.159.04", gpus=tuple(map(gpu, range(GPUS)))),
        cuda=Cuda(version=13000, devices=tuple(map(device, range(GPUS)))),
        nccl=Nccl(
            path="/site/nvidia/nccl/lib/libnccl.so.2",
            found_by="nvidia-nccl wheel",
            version=(2, 28, 9),
            has_window_register=True,
        ),
        software=InstalledTorch(torch="2.11.0+cu130", torch_cuda="13.0", features={"symmetric_memory": True}),
        torch_runtime=TorchRuntime(
            device_count=GPUS, nccl_version=(2, 28, 9), nccl_path="/site/nvidia/nccl/lib/libnccl.so.2"
        ),
        system=System(
            modules=("mlx5_core", "nvidia", "nvidia_peermem"),
            open_driver=True,
            gpu_iommu={f"0000:{index + 16:02x}:00.0": "identity" for index in range(GPUS)},
            acs_redirects=(),
            rdma=tuple(map(port, range(GPUS))),
            net=(NetPort(name="eth0", state="up", speed_gbit_per_s=25.0, mtu=1500),),
        ),
        bandwidth=Bandwidth(
            pairs=tuple(PairRate(source=a, target=b, gb_per_s=393.0 - a / 10) for a, b in pairs),
            rotation=tuple(PairRate(source=0, target=shift, gb_per_s=385.0) for shift in range(1, GPUS)),
        ),
        environment={"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    )
