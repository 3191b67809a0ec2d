"""Links inside a host, from the text of `nvidia-smi topo -m`.

            GPU0  GPU1  NIC0  CPU Affinity
    GPU0     X    NV18  PXB   0-55
    GPU1    NV18   X    PXB   0-55

Distances are in links of 400 Gb/s, as in `topology.py`: NV18 is 50 / 390 (measured with copy engines, 8 × H200,
2026-11-20), fewer links in proportion. The steps of PCIe are an order, not a measurement: PIX 1, PXB 1.25, PHB 1.5,
NODE 2, SYS 3.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.topology import NVLINK_LINKS, check_distances

__all__ = ["read_topo"]

MAX_GPUS = 64
PCIE = {"PIX": 1.0, "PXB": 1.25, "PHB": 1.5, "NODE": 2.0, "SYS": 3.0, "SOC": 3.0}
NVLINKS = 18  # of the machine on which NVLINK_LINKS was measured
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def read_topo(text: str) -> NDArray[np.float64]:
    """`[gpus, gpus]` distances, for `Topology.with_inside`.

    Raises:
        Misconfigured: no table of GPUs, or a link that is none of those above.
    """
    lines = [_COLOUR.sub("", line).split() for line in text.splitlines()]
    head = next((line for line in lines if line and line[0] == "GPU0" and not {"X"} & set(line)), None)
    if head is None:
        raise Misconfigured("no table of GPUs: give the whole output of `nvidia-smi topo -m`")
    gpus = sum(1 for name in head if re.fullmatch(r"GPU\d+", name))
    if gpus > MAX_GPUS:
        raise Misconfigured(f"{gpus} GPUs in one host: at most {MAX_GPUS} are read")
    rows = {line[0]: line[1 : gpus + 1] for line in lines if len(line) > gpus and re.fullmatch(r"GPU\d+", line[0])}
    found = np.zeros((gpus, gpus))
    for row in range(gpus):
        cells = rows.get(f"GPU{row}")
        if cells is None:
            raise Misconfigured(f"no row for GPU{row}, of {gpus} GPUs: give the whole output of `nvidia-smi topo -m`")
        for column, cell in enumerate(cells):
            found[row, column] = _distance(cell, row, column)
    check_distances("nvidia-smi topo", found, gpus)
    return found


def _distance(cell: str, row: int, column: int) -> float:
    links = re.fullmatch(r"NV([1-9]\d?)", cell)
    if row == column and cell == "X":
        return 0.0
    if row != column and links:
        return NVLINK_LINKS * NVLINKS / int(links[1])
    if row != column and cell in PCIE:
        return PCIE[cell]
    raise Misconfigured(f"GPU{row} to GPU{column}: {printable(cell, 20)!r}: give NV1 to NV99, {', '.join(PCIE)}")
