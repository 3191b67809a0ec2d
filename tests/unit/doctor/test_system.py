"""/sys, /proc and /etc on made-up trees: what is read, and what is not when it is missing or rubbish."""

import os
import struct
from pathlib import Path

import pytest

from counterpoint.doctor.readings import NetPort, RdmaPort, System
from counterpoint.doctor.system import acs_redirects, parse_conf, read_system


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def config(*capabilities: tuple[int, int]) -> bytes:
    """Configuration space of a bridge: a chain of (capability, control register) from 0x100 on."""
    space = bytearray(4096)
    for index, (capability, control) in enumerate(capabilities):
        at = 0x100 + index * 0x40
        following = at + 0x40 if index + 1 < len(capabilities) else 0
        struct.pack_into("<I", space, at, capability | 1 << 16 | following << 20)
        struct.pack_into("<H", space, at + 6, control)
    return bytes(space)


MLX = "sys/class/infiniband/mlx5_0/"
PORT = {
    MLX + "fw_ver": "28.39.1002\n", MLX + "board_id": "MT_0000000838\n", MLX + "ports/1/state": "4: ACTIVE\n",
    MLX + "ports/1/rate": "400 Gb/sec (4X NDR)\n", MLX + "ports/1/link_layer": "InfiniBand\n",
    MLX + "device/net/ib0/mtu": "2044\n",
}  # fmt: skip


def test_an_rdma_port_is_read(tmp_path: Path) -> None:
    assert port(tmp_path) == RdmaPort(
        device="mlx5_0", port="1", link_layer="InfiniBand", state="ACTIVE", rate_gbit_per_s=400.0,
        firmware="28.39.1002", board="MT_0000000838", mtu=2044,
    )  # fmt: skip


def port(root: Path, **files: bytes) -> RdmaPort:
    """The port of a machine on which these files hold something else."""
    write(root, PORT | {MLX + name.replace("__", "/"): content for name, content in files.items()})
    rdma = read_system(root).rdma
    assert rdma is not None
    return rdma[0]


@pytest.mark.parametrize("rubbish", [b"", b"fast", b"-1", b"nan Gb/sec", b"1e99", b"\xff\xfe"])
def test_a_rate_that_is_no_number_is_unknown(tmp_path: Path, rubbish: bytes) -> None:
    assert port(tmp_path, ports__1__rate=rubbish).rate_gbit_per_s is None


def test_interfaces_without_hardware_are_left_out(tmp_path: Path) -> None:
    """lo, bridges and tunnels carry no collective to another machine."""
    net = "sys/class/net/"
    write(tmp_path, {net + "lo/mtu": "65536", net + "eth0/mtu": "9000", net + "eth0/operstate": "up"})
    write(tmp_path, {net + "eth0/speed": "100000", net + "eth0/device/vendor": "0x15b3"})
    assert read_system(tmp_path).net == (NetPort(name="eth0", state="up", speed_gbit_per_s=100.0, mtu=9000),)


def test_roots_that_are_empty_or_cannot_be_looked_at_know_nothing(tmp_path: Path) -> None:
    found = read_system(tmp_path)
    assert (found.modules, found.rdma, found.net, found.gpu_iommu, found.acs_redirects) == (None,) * 5
    # errors of the file system, here a name that is too long, are None and not raised
    assert read_system(Path("/") / ("x" * 300)) == System()


def test_the_iommu_type_of_gpus_and_bridges_that_redirect_are_read(tmp_path: Path) -> None:
    pci = "sys/bus/pci/devices/"
    gpu = {"vendor": "0x10de", "class": "0x030200", "iommu_group/type": "DMA-FQ"}
    disk = {"vendor": "0x144d", "class": "0x010802", "iommu_group/type": "DMA"}
    write(tmp_path, {pci + "0000:17:00.0/" + key: value for key, value in gpu.items()})
    write(tmp_path, {pci + "0000:01:00.0/" + key: value for key, value in disk.items()})
    assert read_system(tmp_path).gpu_iommu == {"0000:17:00.0": "DMA-FQ"}
    bridge = "sys/bus/pci/devices/0000:00:01.0/"
    write(tmp_path, {bridge + "class": "0x060400", bridge + "config": config((0x0001, 0), (0x000D, 0x1D))})
    assert read_system(tmp_path).acs_redirects == ("0000:00:01.0",)


@pytest.mark.parametrize(
    ("space", "answer"),
    [
        (config((0x000D, 0x0)), False),
        (config((0x000D, 0x4)), True),
        (config((0x000D, 0x8)), True),
        (config((0x000D, 0x1)), False),  # source validation alone does not redirect
        (config((0x0001, 0xFFFF)), False),
        (bytes(64), None),  # all that an ordinary user may read
        (b"\xff" * 4096, False),  # a device that is gone; the chain leads out of the space
        (struct.pack("<I", 0x100 << 20) * 1024, False),  # a chain that bites its tail
    ],
)
def test_acs_is_told_from_configuration_space(space: bytes, answer: bool | None) -> None:
    """Request and completion redirect count; rubbish ends."""
    assert acs_redirects(space) is answer


def test_nccl_conf_is_read_without_comments() -> None:
    found = parse_conf("# site\nNCCL_DEBUG=WARN\n NCCL_P2P_DISABLE = 1 # why\nrubbish\n")
    assert found == {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1"}


def test_the_open_kernel_module_is_recognised(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    write(tmp_path, {"proc/driver/nvidia/version": version})
    assert read_system(tmp_path).open_driver is True


def test_an_endless_file_is_read_in_part(tmp_path: Path) -> None:
    assert len(port(tmp_path, fw_ver=b"9" * (1 << 20)).firmware or "") <= 64 << 10


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A file that never answers is as good as empty."""
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/nccl.conf")
    assert read_system(tmp_path).nccl_conf == {}
