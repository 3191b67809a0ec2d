"""Say what NCCL's logs show of a job: its communicators, choices and bandwidths, and what is wrong with its set-up.

A remark is made only of what a line says. Times are not in these logs (but NCCL Inspector's), so remarks have no cost;
the exposed communication of the trace is what they can explain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from counterpoint.records.nccl import NcclBandwidth, NcclChoice, NcclCommunicators, NcclRemark, NcclReport
from counterpoint.trace.nccl_log import LoggedCommunicator, NcclLog

_MOST_ROWS = 64
_FEW_CHANNELS = 2
_FEW_SHARE = 0.25  # of the channels of another communicator with as many hosts
_SLOW_SHARE = 0.5  # of the median bandwidth of the same operation and size
_LEAST_CALLS = 3  # of a rank, before its bandwidth is compared
_LEAST_BYTES = 1 << 20  # small messages show latency, not bandwidth
_FORCED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_BUFFSIZE")
_WARNINGS = 3


def nccl_report(log: NcclLog) -> NcclReport:
    """Return the communicators, choices, bandwidths and problems that a job's NCCL logs show."""
    communicators, bandwidths = _communicators(log), tuple(_bandwidths(log))
    choices = sorted(log.choices.items(), key=lambda item: -item[0][1] * item[1])[:_MOST_ROWS]
    return NcclReport(
        files=log.files,
        lines=log.lines,
        version=log.version,
        transports=dict(log.transports.most_common(_MOST_ROWS)),
        settings=dict(sorted(log.settings.items())[:_MOST_ROWS]),
        communicators=communicators[:_MOST_ROWS],
        choices=tuple(
            NcclChoice(op=op, bytes=size, algorithm=algorithm, protocol=protocol, channels=channels, calls=calls)
            for (op, size, algorithm, protocol, channels), calls in choices
        ),
        bandwidths=bandwidths[:_MOST_ROWS],
        remarks=tuple(_remarks(log, communicators, bandwidths)),
    )


def _communicators(log: NcclLog) -> tuple[NcclCommunicators, ...]:
    """Return the communicators, those that are alike as one with their count; most ranks first."""
    alike = Counter(_as_one(views) for views in log.communicators.values())
    found = [
        NcclCommunicators(count=n, ranks=c.ranks, hosts=c.hosts, channels=c.channels, nvls_channels=c.nvls_channels,
                         p2p_channels_per_peer=c.p2p_channels_per_peer)
        for c, n in alike.items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda c: (-c.ranks, c.channels or 0)))


def _as_one(views: list[LoggedCommunicator]) -> LoggedCommunicator:
    """Return the views of several ranks on their communicator as one: of each number, the smallest."""

    def least(name: str) -> int | None:
        return min((n for view in views if (n := getattr(view, name)) is not None), default=None)

    names = ("hosts", "channels", "nvls_channels", "p2p_channels_per_peer")
    return LoggedCommunicator(ranks=max(view.ranks for view in views), **{name: least(name) for name in names})


def _bandwidths(log: NcclLog) -> Iterator[NcclBandwidth]:
    """Yield what NCCL Inspector measured, the operations with most time first."""
    spent = {key: sum(us for calls in ranks.values() for us, _ in calls) for key, ranks in log.measured.items()}
    for key in sorted(spent, key=lambda k: -spent[k]):
        op, size, ranks, hosts = key
        of_ranks = log.measured[key]
        every = [call for calls in of_ranks.values() for call in calls]
        medians = {who: median(rate for _, rate in calls) for who, calls in of_ranks.items()}
        often = {who: rate for who, rate in medians.items() if len(of_ranks[who]) >= _LEAST_CALLS} or medians
        slowest = min(often, key=lambda who: often[who])
        yield NcclBandwidth(
            op=op,
            bytes=size,
            ranks=ranks,
            hosts=hosts,
            calls=len(every),
            time_us=median(us for us, _ in every),
            bus_gb_per_s=median(rate for _, rate in every),
            slowest=slowest,
            slowest_gb_per_s=often[slowest],
        )


def _remarks(
    log: NcclLog, communicators: tuple[NcclCommunicators, ...], bandwidths: tuple[NcclBandwidth, ...]
) -> Iterator[NcclRemark]:
    used = ", ".join(f"{n} connection{'s' * (n != 1)} by {name}" for name, n in log.transports.most_common(4))
    if log.transports["NET/Socket"]:
        yield NcclRemark(
            kind="sockets",
            title="Collectives between hosts go over TCP sockets",
            evidence=used + _quoted(log, "no_infiniband"),
            advice="let NCCL find the network cards: in a container pass /dev/infiniband and ulimit -l unlimited; "
            "unset NCCL_IB_DISABLE and NCCL_NET=Socket; on a cloud install its plugin (libnccl-net). ibstat shows the "
            "cards, counterpoint doctor their state",
        )
    infiniband = sum(n for name, n in log.transports.items() if name.startswith("NET/IB"))
    direct = sum(n for name, n in log.transports.items() if name.startswith("NET/") and "GDRDMA" in name)
    if infiniband and not direct:
        yield NcclRemark(
            kind="no_gpu_direct",
            title="Network cards copy through host memory: no GPUDirect RDMA",
            evidence=f"{used}, none with GDRDMA{_quoted(log, 'no_gdr')}",
            advice="load nvidia-peermem, or use DMA-BUF (kernel 5.12 or newer, open driver); check NCCL_NET_GDR_LEVEL "
            "and that card and GPU are below one PCIe switch (nvidia-smi topo -m)",
        )
    shared = sum(n for name, n in log.transports.items() if name.startswith("SHM"))
    if shared or "p2p_off" in log.said:
        yield NcclRemark(
            kind="host_memory",
            title="GPUs of one host exchange through host memory, not directly",
            evidence=(used or "no connection is logged") + _quoted(log, "p2p_off"),
            advice="unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; else look why GPUs cannot reach each other: "
            "counterpoint doctor (peer access, IOMMU, ACS), nvidia-smi topo -p2p r",
        )
    yield from _few_channels(log, communicators)
    if "no_nvls" in log.said or log.settings.get("NCCL_NVLS_ENABLE", "").strip() == "0":
        yield NcclRemark(
            kind="no_nvls",
            title="Reductions inside NVSwitch (NVLS) are off",
            evidence=log.said.get("no_nvls") or "NCCL_NVLS_ENABLE set to 0",
            advice="NVLS needs Hopper or newer on NVSwitch, a running fabric manager (nvidia-smi -q: Fabric State "
            "Completed), and NCCL_CUMEM_ENABLE not 0; unset NCCL_NVLS_ENABLE. Without it all-reduces move "
            "twice the bytes",
        )
    forced = {name: value for name, value in log.settings.items() if name in _FORCED}
    if forced:
        yield NcclRemark(
            kind="forced",
            title=f"NCCL does not choose freely: {', '.join(forced)} {'is' if len(forced) == 1 else 'are'} set",
            evidence=", ".join(f"{name}={value}" for name, value in forced.items()),
            advice="unset what nobody measured on this machine; set it per communicator (ncclConfig_t) where it helps",
        )
    for b in bandwidths:
        if b.bytes >= _LEAST_BYTES and b.calls > _LEAST_CALLS and b.slowest_gb_per_s < _SLOW_SHARE * b.bus_gb_per_s:
            yield NcclRemark(
                kind="slow_communicator",
                title=f"{b.op} of {b.bytes / 2**20:.1f} MiB is slow on one rank: {b.slowest_gb_per_s:.3g} of "
                f"{b.bus_gb_per_s:.3g} GB/s",
                evidence=f"{b.slowest}; medians of {b.calls} calls on {b.ranks} ranks, by NCCL Inspector",
                advice="a rank that waits for a late peer measures low, too: see who makes others wait in the traces; "
                "if nobody does, look at that host's links and cards (counterpoint doctor)",
            )
            break
    for text, times in log.warnings.most_common(_WARNINGS):
        yield NcclRemark(
            kind="warning", title="NCCL warns", evidence=f"{text} ({times} times)", advice="see what the line says"
        )


def _few_channels(log: NcclLog, communicators: tuple[NcclCommunicators, ...]) -> Iterator[NcclRemark]:
    """Yield a remark on the communicator with fewest channels, if others have several times as many, or it has two."""
    known = [c for c in communicators if c.channels is not None and c.ranks > 1]
    for c in sorted(known, key=lambda c: c.channels or 0)[:1]:
        most = max((o.channels or 0 for o in known if o.hosts == c.hosts), default=0)
        fewer = c.channels is not None and c.channels <= _FEW_SHARE * most
        if fewer or (c.channels is not None and c.channels <= _FEW_CHANNELS and c.hosts == 1 and c.ranks > 2):
            limits = [f"{name}={log.settings[name]}" for name in _FORCED[2:5] if name in log.settings]
            yield NcclRemark(
                kind="few_channels",
                title=f"A communicator of {c.ranks} ranks has {c.channels} channel{'s' * (c.channels != 1)}",
                evidence=f"{c.count} such communicators{f', where others have {most}' if fewer else ''}"
                + (f"; {', '.join(limits)}" if limits else ""),
                advice="each channel is one SM and carries some 20 GB/s: raise NCCL_MIN_CTAS or ncclConfig_t.minCTAs; "
                "if nobody set a limit, NCCL sees slow links: nvidia-smi topo -m, NCCL_DEBUG_SUBSYS=GRAPH",
            )


def _quoted(log: NcclLog, name: str) -> str:
    return f"; the log says: {log.said[name]}" if name in log.said else ""
