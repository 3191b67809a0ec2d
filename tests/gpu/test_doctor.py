"""What doctor reads by itself, against what torch says of the same machine; and faults planted on GPUs."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.command import program

pytestmark = [pytest.mark.gpu(2), pytest.mark.own_gpus("it asks for the GPUs of the machine")]

LIMIT_S = 120
FACTS = """
import json, torch
count = torch.cuda.device_count()
pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
size = 256 << 20
source, target = (torch.randint(255, (size,), dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1))
times = []
for _ in range(7):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    times.append(start.elapsed_time(end))
print(json.dumps({
    "names": [torch.cuda.get_device_name(i) for i in range(count)],
    "sms": [torch.cuda.get_device_properties(i).multi_processor_count for i in range(count)],
    "no_peer": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
    "nccl": list(torch.cuda.nccl.version()),
    "copy_gb_per_s": size / sorted(times)[3] / 1e6,
}))
"""
BUSY = "import torch; kept = torch.ones(1 << 20, device='cuda:0'); print('ready', flush=True); input()"


def run(*command: str, **variables: str) -> str:
    done = program(command, variables=os.environ | variables, timeout_s=LIMIT_S)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def doctor(*options: str, **variables: str) -> dict[str, Any]:
    command = "from counterpoint.cli import main; main()"
    return dict(json.loads(run(sys.executable, "-c", command, "doctor", "--json", "-", *options, **variables)))


def check(checkup: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in checkup["checks"] if found["name"] == name)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return dict(json.loads(run(sys.executable, "-c", FACTS)))


@pytest.fixture(scope="module")
def checkup() -> dict[str, Any]:
    return doctor("--device-checks")


def test_what_is_read_is_what_torch_says(checkup: dict[str, Any], facts: dict[str, Any]) -> None:
    """GPUs, their SMs, access to peers, and the NCCL that torch loads."""
    assert checkup["gpus"] == facts["names"]
    probed = json.loads(run(sys.executable, "-m", "counterpoint.doctor.probe", "cuda"))
    assert [device["num_sms"] for device in probed["devices"]] == facts["sms"]
    assert (check(checkup, "peer_access")["status"] == "ok") == (facts["no_peer"] == [])
    assert check(checkup, "nccl")["values"]["version"] == ".".join(map(str, facts["nccl"]))
    assert check(checkup, "torch_runtime")["status"] == "ok"


def test_bandwidth_is_that_of_a_copy_by_torch(checkup: dict[str, Any], facts: dict[str, Any]) -> None:
    """The best pair is as fast as torch's own copy of as many bytes, but for clocks and chance (20 %)."""
    assert check(checkup, "bandwidth")["values"]["best_gb_per_s"] == pytest.approx(facts["copy_gb_per_s"], rel=0.2)


def test_nothing_but_warnings_on_a_healthy_machine(checkup: dict[str, Any]) -> None:
    assert [found["name"] for found in checkup["checks"] if found["status"] == "problem"] == []


def test_a_process_on_a_gpu_is_seen() -> None:
    """Somebody else's context on GPU 0 is a warning; our own child processes are none."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        found = check(doctor("--no-bandwidth"), "other_processes")
        busy.communicate("\n", timeout=LIMIT_S)
    assert (found["status"], found["values"]["gpus"]) == ("warning", 1)


def test_hidden_gpus_are_said() -> None:
    found = check(doctor(CUDA_VISIBLE_DEVICES="0"), "bandwidth")
    assert (found["status"], found["seen"]) == ("not_seen", "it takes two GPUs that CUDA shows")
