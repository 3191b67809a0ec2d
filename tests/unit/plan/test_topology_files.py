"""Topologies from files: each format in small, and what is wrong with files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.placement.read_slurm import MAX_TEXT, hostlist, plain_yaml, read_conf, read_yaml
from counterpoint.plan.placement.read_topology import read_matrix_csv, read_matrix_json, read_topograph, read_topology
from counterpoint.plan.placement.topology import Topology

TREE = """
# two leaves
switchname=s0 Nodes=dev[0-1]
SwitchName=s1 nodes=dev[2-3] LinkSpeed=100
SwitchName=s2 Switches=s[0-1]
"""
BLOCKS = """
BlockName=b1 Nodes=node[1-2]
BlockName=b2 Nodes=node[3-4]
BlockName=b3 Nodes=node[5-6]
BlockName=b4 Nodes=node[7-8]
BlockSizes=2,4
"""
YAML = """
---
- topology: plain   # comment
  flat: true
- topology: trees
  cluster_default: True
  tree:
    switches:
      - switch: s0
        nodes: "dev[0-1]"
      - switch: s1
        nodes: 'dev[2-3]'
      - switch: s2
        children: s[0-1]
- topology: blocks
  block:
    block_sizes: [2, 4]
    blocks:
    - block: b1
      nodes: node[1-2]
    - block: b2
      nodes: node[3-4]
    - block: b3
      nodes: node[5-6]
    - block: b4
      nodes: node[7-8]
"""


def units(topology: Topology) -> list[list[int]]:
    return [row.tolist() for row in topology.units]


@pytest.mark.parametrize("text", [TREE, TREE.replace(" Nodes=dev[0-1]", " \\\n Nodes=dev[0-1]")])
def test_slurm_trees(text: str) -> None:
    """Names in any case, short lists, comments, continued lines."""
    found = read_conf(text, gpus=8)
    assert (found.hosts, units(found)) == (("dev0", "dev1", "dev2", "dev3"), [[0, 0, 1, 1], [0, 0, 0, 0]])


def test_slurm_blocks_and_short_paths() -> None:
    """Block sizes 2, 4: blocks, pairs of blocks, and all."""
    found = read_conf(BLOCKS, gpus=4)
    assert units(found) == [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1], [0] * 8]
    # A host at the root's own switch is as far from all others as the root
    found = read_conf("SwitchName=s0 Nodes=a,b\nSwitchName=s1 Switches=s0 Nodes=c", gpus=1)
    assert units(found) == [[0, 0, 1], [0, 0, 0]]


def test_slurm_yaml_is_the_same_as_conf_and_its_names_stay_text() -> None:
    """The default topology of the YAML file is the tree of the other format; another is chosen by its name."""
    assert units(read_yaml(YAML, gpus=8)) == units(read_conf(TREE, gpus=8))
    assert units(read_yaml(YAML, gpus=8, name="blocks")) == units(read_conf(BLOCKS, gpus=8))
    # hosts called 0017 and 1e3 are no numbers, and one called on is no truth value
    found = read_yaml("- topology: t\n  block:\n    blocks:\n    - block: b\n      nodes: 0017,1e3,on", gpus=8)
    assert found.hosts == ("0017", "1e3", "on")


def test_hostlists() -> None:
    assert hostlist("a[8-10,3],b,c[01-02]-[0-1]x") == [
        *("a8", "a9", "a10", "a3", "b", "c01-0x", "c01-1x", "c02-0x", "c02-1x")
    ]  # fmt: skip


def test_topograph() -> None:
    """Switches the closest first, and NVLink domains below them."""
    rows = [("n1", ["l1", "s"], "d1"), ("n2", ["l1", "s"], "d1"), ("n3", ["l1", "s"], "d2"), ("n4", ["l2", "s"], "d3")]
    text = json.dumps(
        {"instances": [{"id": i, "network_layers": layers, "attributes": {"nvlink": d}} for i, layers, d in rows]}
    )
    assert units(read_topograph(text, gpus=4)) == [[0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0]]


CSV = "bandwidth,a,b,c\na,,50,25\nb,50,,20\nc,25,20,\n"


def test_matrices_in_csv_and_json() -> None:
    """Bandwidths in GB/s become nanoseconds per byte."""
    found = read_matrix_csv(CSV)
    assert found.host_distance[0].tolist() == pytest.approx([0.0, 1 / 50, 1 / 25])
    # the mean of both ways counts
    text = json.dumps({"kind": "distance", "names": list("abc"), "matrix": [[0, 1, 3], [3, 0, 4], [3, 4, None]]})
    assert read_matrix_json(text).host_distance[0].tolist() == [0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b", '2 roots \\("s0", "s1"\\)'),
        ("SwitchName=s0 Switches=s1\nSwitchName=s1 Switches=s0", "0 roots"),
        ("SwitchName=s0 Switches=s1 Nodes=x\nSwitchName=r Nodes=y\nSwitchName=s1 Switches=s0", "ring or a chain"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=a\nSwitchName=s2 Switches=s0,s1", '"a" is at "s0" and at "s1"'),
        ("SwitchName=s0 Switches=s9", '"s9" below "s0" is not defined'),
        (
            "SwitchName=s0 Nodes=a\nSwitchName=s1 Switches=s0\nSwitchName=s2 Switches=s0\nSwitchName=r Switches=s[1-2]",
            'is below "s1" and below "s2"',
        ),
        ("SwitchName=s0", "without Switches and without Nodes"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s0 Nodes=b", "defined twice"),
        ("SwitchName=s0 Knots=a", "line 1"),
        ("Nodes=a", "begins with SwitchName"),
        ("SwitchName=s0 BlockName=b Nodes=a", "give either"),
        ("SwitchName=s0 Nodes=a\nBlockName=b Nodes=b", "one plugin"),
        ("BlockName=b Nodes=a\nBlockSizes=2", "has 1 hosts"),
        ("BlockName=b Nodes=a[1-3]\nBlockSizes=1,3", "power of two"),
        ("BlockName=b Nodes=a\nBlockSizes=x", "BlockSizes"),
        ("SwitchName=s0 Nodes=a[0-99999999]", "rising one of at most"),
        ("SwitchName=s0 Nodes=a[0-999][0-999][0-999]", "more than 65536 names"),
        ("SwitchName=s0 Nodes=a[3-1]", "rising"),
        ("SwitchName=s0 Nodes=a[3-", "bracket"),
        ("SwitchName=s0 Nodes=a[x]", "a number or a range"),
        ("SwitchName=s0 Nodes=a,,b", "empty name"),
        ("", "neither switches nor blocks"),
    ],
)
def test_faults_of_topology_conf_are_told(text: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        read_conf(text, gpus=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("topology: a", "list of topologies"),
        ("- topology: a\n  flat: true", "name hosts"),
        ("- topology: a\n  flat: true\n- topology: b\n  flat: true", "none is the cluster's default; choose from a, b"),
        ("- topology: a\n  tree:\n    switches: s", r"\.switches`: give a list"),
        ("- topology: a\n  tree:\n    switches:\n    - switch: s\n      nodes: [a]", r"\.switches\[0\]"),
        ("- topology: a\n\tflat: true", "line 2"),
        ("- topology: &x a", "line 1: anchors, aliases and tags"),
        ("- topology: a\n- *x", "line 2: anchors, aliases and tags"),
        ("- topology: !!python/object:os.system a", "line 1: anchors, aliases and tags"),
        ("- topology: a\n  ? [x]\n  : y", "line 2"),
        ("- topology: a\n  topology: b", "line 2: topology is no name, or is given twice"),
        ("- topology: a\n    tree: b\n  c: d", "line 2"),
        ("- topology: a\n---\n- topology: b", "line 2: a second document"),
        ("- topology: \x07", "give YAML"),
        ("a" * (MAX_TEXT + 1), "at most"),
        (
            "- topology: a\n  tree:\n    switches:\n    - switch: s\n      nodes: a\n    - switch: s\n      nodes: b",
            "twice",
        ),
        ("- topology: a\n  block:\n    blocks:\n    - block: b\n      nodes: a\n    block_sizes: [x]", "BlockSizes"),
        ("\n".join("  " * depth + "a:" for depth in range(40)), "levels deep|nesting depth"),
        ("[" * 100_000, "levels deep|nesting depth"),
    ],
)
def test_faults_of_topology_yaml_are_told(text: str, said: str) -> None:
    """What is no topology is refused, and so are aliases, tags and deep nesting, with the line."""
    with pytest.raises(Misconfigured, match=said):
        read_yaml(text, gpus=8)


def test_a_yaml_bomb_is_refused_at_its_first_alias() -> None:
    """Nine levels of nine aliases would be 387 million words."""
    lines = ["- &a0 [lol]", *(f"- &a{k} [{', '.join(9 * [f'*a{k - 1}'])}]" for k in range(1, 10))]
    with pytest.raises(Misconfigured, match="line 1: anchors, aliases and tags are not read"):
        read_yaml("\n".join(lines), gpus=8)


@given(text=st.text(alphabet="ab:-[]\"'#& \n,", max_size=60))
def test_no_text_breaks_the_yaml_reader(text: str) -> None:
    """It gives text, lists and mappings, or says what is wrong."""
    try:
        found = plain_yaml(text)
    except Misconfigured:
        return
    assert isinstance(found, (dict, list, str))


@given(text=st.text(alphabet="SwitchNameNodes=s012[]-,# \n", max_size=80))
def test_no_text_breaks_the_conf_reader(text: str) -> None:
    try:
        found = read_conf(text, gpus=1)
    except Misconfigured:
        return
    assert found.num_slots >= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "first cell"),
        ("speed,a,b", "first cell"),
        ("distance,a,b\na,0,1", "square"),
        ("distance,a,b\na,0,1,2\nb,1,0", "square"),
        ("distance,a,b\nb,0,1\na,1,0", "columns say"),
        ("distance,a,b\na,0,x\nb,1,0", "could not convert"),
        ("distance,a,b\na,0,-1\nb,-1,0", "0 or more"),
        ("bandwidth,a,b\na,,0\nb,0,", "above 0"),
        ("bandwidth,a,b\na,,\nb,1,", "empty cell"),
        ("distance", "0 names"),
    ],
)
def test_faults_of_a_matrix_are_told(text: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        read_matrix_csv(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "instances"),
        ('{"instances": [{"id": "a"}]}', "network_layers"),
        ('{"instances": []}', "0 hosts"),
        ('{"instances": [{"id": "a", "network_layers": []}]}', "is empty"),
        ('{"instances": [{"id": "a", "network_layers": ["x"]}, {"id": "a", "network_layers": ["x"]}]}', "twice"),
        ('{"instances": [{"id": "a", "network_layers": ["x"]}, {"id": "b", "network_layers": ["y"]}]}', "2 roots"),
    ],
)
def test_faults_of_topograph_are_told(text: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        read_topograph(text, gpus=8)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("topology.conf", TREE),
        ("topology.yaml", YAML),
        ("hosts.json", '{"instances": [{"id": "a", "network_layers": ["x"]}, {"id": "b", "network_layers": ["x"]}]}'),
        ("measured.json", '{"kind": "distance", "matrix": [[0, 1], [1, 0]]}'),
        ("measured.csv", CSV),
    ],
)
def test_files_are_known_by_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert len(read_topology(tmp_path / name).hosts) >= 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("topology.txt", b"", "not known by its name"),
        ("topology.conf", None, "No such file"),
        ("topology.conf", b"\xff\xfe", "is not UTF-8"),
        ("topology.conf", b"Nodes=a", "topology.conf: topology.conf, line 1"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Misconfigured, match=said):
        read_topology(tmp_path / name)


def test_a_name_is_for_yaml_only(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(TREE)
    with pytest.raises(Misconfigured, match="has several topologies"):
        read_topology(tmp_path / "topology.conf", name="trees")
