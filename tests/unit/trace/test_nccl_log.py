"""What NCCL's logs say: lines as NCCL 2.12 to 2.28 print them, NCCL Inspector's records, and what is wrong by them."""

import json
from pathlib import Path

import pytest

from counterpoint.cli import app, main
from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.nccl_report import nccl_report
from counterpoint.errors import BadTrace
from counterpoint.records.nccl import NcclChoice, NcclReport
from counterpoint.trace.nccl_log import read_nccl_logs
from tests.support import kineto_trace as kt

CHANNELS = "{0} coll channels, {0} collnet channels, {1} nvls channels, 32 p2p channels, 2 p2p channels per peer"


def line(text: str, *, host: str = "node0", pid: int = 7070, level: str = "INFO", prefix: str = "") -> str:
    return f"{prefix}{host}:{pid}:{pid + 5} [0] NCCL {level} {text}\n"


def communicator(ident: str, ranks: int, channels: int, *, nvls: int = 0, pid: int = 7070, hosts: int = 1) -> str:
    return (
        line(f"comm 0x5630 rank 0 nRanks {ranks} nNodes {hosts} localRanks 8 localRank 0 MNNVL 0", pid=pid)
        + line(CHANNELS.format(channels, nvls), pid=pid)
        + line(
            f"ncclCommInitRankConfig comm 0x5630 rank 0 nranks {ranks} cudaDev 0 nvmlDev 0 busId 1e0 commId {ident} "
            "- Init COMPLETE",
            pid=pid,
        )
    )


def connected(via: str, times: int = 1) -> str:
    return "".join(line(f"Channel {n:02d}/0 : 0[0] -> 1[1] via {via}") for n in range(times))


def inspected(rank: int, rate: float, *, op: str = "AllReduce", size: int = 1 << 26) -> str:
    header = {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 8, "nnodes": 1}
    perf = {"coll": op, "coll_sn": 1, "coll_msg_size_bytes": size, "coll_exec_time_us": 300, "coll_busbw_gbs": rate}
    metadata = {"inspector_output_format_version": "v4.0", "hostname": "node0"}
    return json.dumps({"header": header, "metadata": metadata, "coll_perf": perf}) + "\n"


def report(text: str, tmp_path: Path) -> NcclReport:
    path = tmp_path / "nccl.log"
    path.write_text(text)
    return nccl_report(read_nccl_logs([str(path)]))


HEALTHY = (
    line("NCCL version 2.28.9+cuda13.0")
    + connected("P2P/CUMEM", 24)
    + communicator("0x1ce7", 8, 24, nvls=16)
    + communicator("0x1ce8", 8, 24, nvls=16, pid=7071)
)


def test_a_healthy_log(tmp_path: Path) -> None:
    """Lines stand between those of other programs, with prefixes; communicators that are alike count as one row."""
    found = report("Epoch 1: loss 2.3\n" + HEALTHY.replace("node0:", "3: node0:"), tmp_path)
    (row,) = found.communicators
    assert (found.version, found.transports, found.remarks) == ("2.28.9+cuda13.0", {"P2P/CUMEM": 24}, ())
    assert (row.count, row.ranks, row.hosts, row.channels, row.nvls_channels) == (2, 8, 1, 24, 16)


def test_a_communicator_has_the_fewest_channels_of_its_ranks(tmp_path: Path) -> None:
    found = report(communicator("0xa", 8, 24) + communicator("0xa", 8, 16, pid=7071), tmp_path)
    assert [(c.count, c.channels) for c in found.communicators] == [(1, 16)]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("AllReduce: 8388608 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}", ("ring", "ll128", 16)),
        ("AllGather: 8388608 Bytes -> Algo 1 proto 2 time 2860.208008", ("ring", "simple", None)),
        ("AllReduce: 8388608 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..23}", ("nvls", "simple", 24)),
        ("AllGather [Symmetric]: 8388608 Bytes -> Kernel AllGather_LLMC nchannels 1", ("AllGather_LLMC", None, None)),
    ],
)
def test_what_nccl_chose(text: str, choice: tuple[str, str | None, int | None], tmp_path: Path) -> None:
    (found,) = report(line(text) * 3, tmp_path).choices
    algorithm, protocol, channels = choice
    op = text.split(":")[0].split(" ")[0]
    assert found == NcclChoice(op=op, bytes=8388608, algorithm=algorithm, protocol=protocol, channels=channels, calls=3)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (line("NET/IB : No device found.") + connected("NET/Socket/0", 4), "sockets", "No device found"),
        (connected("NET/IB/0", 4), "no_gpu_direct", "none with GDRDMA"),
        (connected("SHM/direct/direct", 2), "host_memory", "2 connections by SHM/direct/direct"),
        (line("P2P is disabled between connected GPUs 1 and 0."), "host_memory", "between connected GPUs 1 and 0"),
        (line("NVLS multicast support is not available on dev 0"), "no_nvls", "not available on dev 0"),
        (line("NCCL_NVLS_ENABLE set by environment to 0."), "no_nvls", "NCCL_NVLS_ENABLE"),
        (line("NCCL_ALGO set by environment to ring,tree"), "forced", "NCCL_ALGO=ring,tree"),
        (communicator("0xa", 8, 2), "few_channels", "1 such"),
        (communicator("0xa", 2, 2) + communicator("0xb", 8, 24), "few_channels", "others have 24"),
        (line("Call to ibv_reg_mr failed", level="WARN") * 2, "warning", "ibv_reg_mr failed (2 times)"),
        ("".join(inspected(r, 90.0 if r == 3 else 400.0) * 3 for r in range(8)), "slow_communicator", "rank 3"),
    ],
)
def test_what_is_wrong(text: str, kind: str, says: str, tmp_path: Path) -> None:
    (remark,) = report(text, tmp_path).remarks
    assert remark.kind == kind
    assert says in remark.evidence


@pytest.mark.parametrize(
    "text",
    [
        connected("NET/IB/0/GDRDMA", 4),
        communicator("0xa", 2, 2),  # two ranks may have two channels
        communicator("0xa", 16, 2, hosts=2),
        "".join(inspected(r, 300.0 + 40 * r) * 3 for r in range(8)),
        "".join(inspected(r, 1.0 if r == 3 else 4.0, size=512) * 3 for r in range(8)),
    ],
)
def test_what_is_not_wrong(text: str, tmp_path: Path) -> None:
    assert report(text, tmp_path).remarks == ()


def test_what_inspector_measured(tmp_path: Path) -> None:
    text = "".join(inspected(r, 400.0 + r) for r in range(5)) + '{broken "coll_perf"\n'
    (found,) = report(text, tmp_path).bandwidths
    assert (found.op, found.ranks, found.calls, found.time_us, found.bus_gb_per_s) == ("AllReduce", 8, 5, 300.0, 402.0)
    assert (found.slowest, found.slowest_gb_per_s) == ("communicator 0x7f8c496ae9f661, rank 0", 400.0)


def test_the_verdict_and_the_page_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, log = kt.write_job(tmp_path / "job"), tmp_path / "logs" / "nccl.node0.7070"
    log.parent.mkdir()
    log.write_text(connected("NET/Socket/0", 4) + line("<script>alert(1)</script>", level="WARN"))
    page = tmp_path / "report.html"
    app(["diagnose", str(job), "--nccl-log", str(log.parent), "--out", str(page)], standalone_mode=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "NCCL's log says: Collectives between hosts go over TCP sockets." in printed
    assert "→ let NCCL find the network cards" in printed
    assert "TCP sockets" in page.read_text()
    assert "<script>alert(1)" not in page.read_text()


@pytest.mark.parametrize("content", [b"", b"no line\n" * 9, b"\x00\xff" * 70_000, b'{"coll_perf": 1}\n'])
def test_what_is_no_log_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    for source in (str(tmp_path / "log"), str(tmp_path / "missing"), str(tmp_path / "*.none")):
        with pytest.raises(BadTrace) as caught:
            read_nccl_logs([source])
        assert caught.value.path == source


def test_a_long_line_counts_once(tmp_path: Path) -> None:
    """Of a line beyond 64 KiB the rest is passed over, though it looks like lines."""
    found = report(
        "x" * (1 << 16) + line("NCCL_ALGO set by environment to tree") + line("NCCL version 2.28.9"), tmp_path
    )
    assert (found.settings, found.version) == ({}, "2.28.9")


def test_dumps_of_the_flight_recorder_take_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nccl_trace_rank_0").write_text('{"version": "2.5", "pg_config": {}, "entries": []}')
    monkeypatch.setattr("sys.argv", ["counterpoint", "diagnose", str(tmp_path), "--nccl-log", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "flight-recorder dumps have no page" in capsys.readouterr().err


def test_the_logs_come_by_python_too(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(HEALTHY)
    found = diagnose(kt.write_job(tmp_path / "job"), nccl_logs=[tmp_path / "log"]).diagnosis
    assert found.nccl is not None
    assert "NCCL's log" not in found.verdict
