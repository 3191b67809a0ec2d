"""Networks by name, and the protocols that serve them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.algorithms import ALGORITHMS
from counterpoint.plan.cluster import Cluster
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.network import OPERATIONS, Network, Protocol
from counterpoint.plan.networks import fitted_protocols, levels, names, nccl_protocols, network_of, source

GROWING = [name for name in names() if not name.startswith("nvlink")]


@pytest.mark.parametrize("name", names())
def test_every_network_says_where_its_figures_are_from(name: str) -> None:
    """Each has a source."""
    assert len(source(name)) > 20


@given(name=st.sampled_from(GROWING), gpus=st.integers(1, 32768))
def test_a_network_is_cut_to_its_job(name: str, gpus: int) -> None:
    """It has as many GPUs as asked for, up to whole units of the level below the last."""
    found = levels(name, gpus)
    below = found[-2].size if len(found) > 1 else 1
    assert gpus <= found[-1].size < gpus + below


@given(name=st.sampled_from(GROWING), gpus=st.integers(1, 32768))
def test_a_cut_network_is_a_cluster(name: str, gpus: int) -> None:
    """Sizes of levels divide each other, which a cluster checks."""
    assert Cluster(gpu=find_gpu("H100"), levels=levels(name, gpus)).num_gpus >= gpus


def test_nvlinks_do_not_grow() -> None:
    """A host of 8 GPUs is not stretched to 16."""
    with pytest.raises(Misconfigured, match=r"cluster.gpus = 16 on nvlink-h100: 8 GPUs are all it joins"):
        levels("nvlink-h100", 16)


def test_unknown_networks_are_refused() -> None:
    """The error lists the known ones."""
    with pytest.raises(Misconfigured, match=r"cluster.network = 'token ring': choose from: nvlink-a100, "):
        levels("token ring", 8)


@pytest.mark.parametrize("gpus", [0, -8])
def test_no_gpus_are_refused(gpus: int) -> None:
    """A cluster has at least one."""
    with pytest.raises(Misconfigured, match=rf"cluster.gpus = {gpus}: give a number above 0"):
        levels("h100-roce-400", gpus)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["nvlink", "pcie", "network"])
def test_nccls_protocols_serve_everything(operation: str, kind: str) -> None:
    """For every operation, algorithm and kind of level there is a protocol."""
    network = Network(
        cluster=Cluster(gpu=find_gpu("A100"), levels=levels("nvlink-a100", 8)), protocols=nccl_protocols()
    )
    assert all(network.protocols_for(operation, algorithm, kind) for algorithm in ALGORITHMS)


def test_a_network_without_protocols_says_so() -> None:
    """What is missing stands in the error."""
    network = Network(name="bare", cluster=Cluster(gpu=find_gpu("A100"), levels=levels("nvlink-a100", 8)), protocols=())
    with pytest.raises(
        Misconfigured, match=r"network 'bare': no protocol serves all_reduce by ring over nvlink; it has: none"
    ):
        network.protocols_for("all_reduce", "ring", "nvlink")


def test_a_fit_serves_its_gpu_only() -> None:
    """H200 hosts have fitted protocols, A100 hosts have NCCL's."""
    names_of = {
        gpu: {
            protocol.name
            for protocol in network_of(Cluster(gpu=find_gpu(gpu), levels=levels("nvlink-h100", 8))).protocols_for(
                "all_reduce", "ring", "nvlink"
            )
        }
        for gpu in ("H200", "A100")
    }
    assert names_of == {"H200": {"fitted"}, "A100": {"LL", "LL128", "Simple"}}


def test_what_was_fitted_says_how_far_it_is_off() -> None:
    """Every fitted protocol has the error on held-out rows, within what is asked of the model."""
    fits = [protocol.fit for each in fitted_protocols() for protocol in each.protocols]
    assert fits
    assert all(fit and fit.error_max is not None and fit.error_max <= 0.1 for fit in fits)


def test_fitted_curves_keep_their_promise() -> None:
    """Slopes of log φ lie within 0 and 1, so that time never falls with bytes or latency."""
    slopes = [
        (y1 - y0) / (x1 - x0)
        for each in fitted_protocols()
        for protocol in each.protocols
        for (x0, y0), (x1, y1) in zip(protocol.curve, protocol.curve[1:], strict=False)
    ]
    assert slopes
    assert -1e-3 <= min(slopes) <= max(slopes) <= 1 + 1e-3


def test_a_protocol_knows_the_levels_it_is_used_on() -> None:
    """A network over NICs with a protocol for NVLink only is refused."""
    host_only = Protocol(name="host", base_us=1.0, hop_us={"nvlink": 1.0}, efficiency={"nvlink": 1.0})
    cluster = Cluster(gpu=find_gpu("H100"), levels=levels("h100-roce-400", 64))
    with pytest.raises(
        Misconfigured, match=r"protocol 'host' has no hop_us or efficiency for 'network', which level 'rack'"
    ):
        Network(cluster=cluster, protocols=(host_only,))


@pytest.mark.parametrize("curve", [((0.0, 0.0), (1.0, 1.5)), ((0.0, 0.0), (1.0, -0.5)), ((1.0, 0.0), (0.0, 0.0))])
def test_a_curve_that_breaks_its_promise_is_refused(curve: tuple[tuple[float, float], ...]) -> None:
    """Slopes beyond 0 and 1 would let time fall with more bytes, or with more latency."""
    with pytest.raises(Misconfigured, match="give ascending points with slopes between 0 and 1"):
        Protocol(name="odd", base_us=1.0, hop_us={}, efficiency={}, curve=curve)
