"""`counterpoint plan`: parse, call, print."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.command import Ended, counterpoint, program

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "llama3-8b-one-node.toml"


def run(*arguments: str | Path) -> Ended:
    return counterpoint("plan", *arguments)


def test_a_table_by_default() -> None:
    """Headline, whether it fits, parts, error of the model; in a process of its own."""
    done = program([sys.executable, "-m", "counterpoint", "plan", EXAMPLE])
    assert done.returncode == 0
    assert done.stdout.startswith("llama3-8b on 8 × H200: ")
    assert "Where the step goes" in done.stdout
    assert "error of the model: " in done.stdout


def test_json_and_nothing_else() -> None:
    done = run(EXAMPLE, "--json", "-", "--mechanism", "zero_sm", "--set", "training.recompute=full")
    found = json.loads(done.stdout)
    assert found["schema"] == "counterpoint.plan/1"
    assert found["asked"] == {"mechanism": "zero_sm", "training.recompute": "full"}


def test_a_sweep_and_a_search_are_tables() -> None:
    done = run(EXAMPLE, "--sweep", "training.micro_batch=1,2", "--search", "--set", "training.global_batch=16")
    assert "training.micro_batch" in done.stdout
    assert "The fastest of" in done.stdout


def test_a_config_of_hugging_face_becomes_a_job(tmp_path: Path) -> None:
    config, written = tmp_path / "config.json", tmp_path / "job.toml"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, '
        '"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "rope_theta": 1}'
    )
    missing = run(config)
    assert (missing.returncode, "add --set training.sequence=TOKENS" in missing.stderr) == (2, True)
    batch = ("--set", "training.sequence=4096", "--set", "training.global_batch=64")
    flags = (*batch, "--gpu", "H100", "--network", "h100-ndr-400")
    first = run(config, *flags, "--nodes", "2", "--write-job", written)
    assert "neither time nor memory: model_type, rope_theta" in first.stdout
    assert run(written).stdout.splitlines()[0] == first.stdout.splitlines()[0]


def test_a_search_writes_its_ways_and_its_winner(tmp_path: Path) -> None:
    """The winner's file is predicted as the search predicted it, and the memory of its stages is said."""
    table, winner = tmp_path / "ways.csv", tmp_path / "winner.toml"
    asked = ("--search", "--fix", "pp=4", "--fix", "micro_batch=1", "--top", "2", "--json", "-")
    done = json.loads(run(EXAMPLE, *asked, "--csv", str(table), "--winner", str(winner)).stdout)
    assert len(done["search"]["choices"]) == 2
    assert len(table.read_text().splitlines()) == 3
    again = json.loads(run(str(winner), "--json", "-").stdout)
    assert again["step_us"] == done["search"]["choices"][0]["step_us"]
    assert len(again["stage_memory_gib"]) == 4
    assert "memory of the stages, GiB: " in run(str(winner)).stdout


def test_a_search_for_each_number_of_gpus_is_a_table(tmp_path: Path) -> None:
    """Its winner is a job on the cheapest of them."""
    fixed = ("--fix", "tp=8", "--fix", "micro_batch=1")
    winner = tmp_path / "winner.toml"
    done = run(EXAMPLE, "--search", "--gpus", "16,8", "--objective", "cost", *fixed, "--winner", winner)
    assert "The fastest way for each number of GPUs  ranked by cost" in done.stdout
    assert "on 8 × " in run(winner).stdout


def test_days_cost_and_goodput_of_the_whole_training() -> None:
    given = ("tokens=1e12", "price_per_gpu_hour=2", "gpu_mtbf_hours=20000")
    done = run(EXAMPLE, *(f"--set=run.{each}" for each in given))
    for said in ("The whole training", "GPU-hours", "goodput", "checkpoints", "lost work", "restarts"):
        assert said in done.stdout


def test_a_network_is_fitted_and_written(tmp_path: Path) -> None:
    """What nccl-tests printed in, a file that a job can name out."""
    times = [round(20 + size / 150e3, 1) for size in (1 << power for power in range(16, 30))]
    rows = [
        f"  {1 << power}  1  float  none  -1  {us}  {(1 << power) / us / 1e3:.2f}  {(1 << power) / us / 2e3:.2f}  0"
        for power, us in zip(range(16, 30), times, strict=True)
    ]
    devices = [f"#  Rank {rank} Group  0 Pid 1 on host device {rank} [0x07] NVIDIA H200" for rank in (0, 1)]
    (tmp_path / "all_gather_perf.txt").write_text("\n".join([*devices, *rows]))
    done = run("--fit", tmp_path / "all_gather_perf.txt", "--write-network", tmp_path / "mine.json")
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout
    assert "error, mean" in done.stdout
    assert run(EXAMPLE, "--network", tmp_path / "mine.json").returncode == 0


def test_explain_prints_the_formula() -> None:
    assert "exposed_comm = " in run(EXAMPLE, "--explain", "exposed_comm").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--csv", "ways.csv"], "--csv is about --search: give it, too"),
        (["--min-fits", "0.9"], "--min-fits is about --search: give it, too"),
        (["--search", "--min-fits", "1"], "--min-fits 1: give a probability above 0 and below 1"),
        (["--search", "--gpus", "8,x"], "--gpus 8,x: give numbers from 1"),
        (["--objective", "cost"], "--objective is about --search: give it, too"),
        (
            ["--search", "--objective", "cost"],
            "--objective cost: the fastest way on one number of GPUs",
        ),
        (["--search", "--fix", "colour=2"], "colour is no axis of a search"),
        (["--mechanism", "magic"], "mechanism = 'magic': known are nccl"),
        (["--set", "cluster.machine=none.json"], "cluster.machine = none.json: No such file or directory"),
        (["--set", "parallel.shards=2"], "parallel.shards is not known: give shard, or another of dp"),
        (["--set", "run.tokens=9e18"], "run.tokens = 9e+18: give a number from 1 to 10,000,000,000,000,000"),
        (["--set", "run.price_per_gpu_hour=2"], "run.tokens and run.steps: neither given"),
        (["--fit", "nccl.txt"], "--fit with a job: it fits a network and plans nothing"),
        (["--ranks", "8"], "--ranks and --write-network are about --fit"),
        (["--set", "parallel.tp"], "--set parallel.tp: give FIELD=VALUE"),
        (["--sweep", "nodes="], "--sweep nodes=: give FIELD=VALUE"),
        (["--json", ""], "--json without a name"),
        (["--explain", "colour"], "nothing has that name"),
        (["--explain", "step", "--json", "-"], "give it, or --json, not both"),
        (["--explain", "step", "--search"], "give it, or --search, not both"),
        (["--sweep", "nodes=1,many"], "nodes = many: give a number of nodes"),
        (["--html", "/nowhere/page.html"], "there is no folder /nowhere"),
        (["--bogus", "3"], "No such option: --bogus"),
        (["--nodes"], "requires an argument; --help lists"),
        (["--set", "parallel.tp=1", "--set", "parallel.tp=2"], "--set parallel.tp comes twice"),
    ],
)
def test_what_cannot_be_ends_with_2_and_one_line(arguments: list[str], said: str) -> None:
    done = run(EXAMPLE, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_job_writes_no_page(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\nlayers = 2\n")
    done = run(tmp_path / "job.toml", "--html", tmp_path / "page.html")
    assert done.returncode == 2
    assert not (tmp_path / "page.html").exists()


TRACE = Path(__file__).parents[2] / "samples" / "fsdp-healthy"


def test_a_trace_as_it_was_measured() -> None:
    done = run("--from-trace", TRACE)
    assert done.stdout.startswith("trace on 8 × H200: 156.1 ms a step")


def test_a_trace_on_more_nodes() -> None:
    """Collectives take longer over the network; what goes over shards, a quarter of the time."""
    one, four = (
        json.loads(run("--from-trace", TRACE, "--network", "h200-ndr-400", *more, "--json", "-").stdout)
        for more in ((), ("--weak-nodes", "4"))
    )
    assert (four["gpus"], four["fits"]) == (32, None)
    home, away = ([sum(part["us"] for part in found["comm"]), found["parts"][0]["us"]] for found in (one, four))
    assert (away[0] > home[0], away[1] < home[1]) == (True, True)


def test_a_page_of_a_trace(tmp_path: Path) -> None:
    done = run("--from-trace", TRACE, "--html", tmp_path / "page.html")
    assert done.returncode == 0
    text = (tmp_path / "page.html").read_text()
    assert "None" not in text[text.index("<main") : text.index("</main>")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from-trace", TRACE, "--mechanism", "zero_sm"], "a trace can answer weak_nodes"),
        (["--from-trace", TRACE, "--weak-nodes", "4"], "give a network that has levels above"),
        (["--from-trace", TRACE, "--search"], "--search with --from-trace"),
        (["--from-trace", TRACE, "--recorded-on", "token-ring"], "token-ring"),
        (["--recorded-on", "nvlink-h100"], "--recorded-on is about --from-trace"),
        ([], "there is nothing to plan"),
        ([EXAMPLE, "--from-trace", TRACE, "--observed", "9s"], "either it or --from-trace"),
        (["--observed", "9s"], "--observed is the step of a job"),
        ([EXAMPLE, "--observed", "9"], "--observed 9: give a time with its unit, as in 9.2s or 850ms"),
        ([EXAMPLE, "--observed", "9s", "--explain", "step"], "give it, or --observed, not both"),
    ],
)
def test_what_a_trace_cannot_answer(arguments: list[str | Path], said: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_an_observed_step_is_judged_and_shifts_what_ifs() -> None:
    """Be it given or that of traces."""
    given = json.loads(run(EXAMPLE, "--observed", "45s", "--json", "-").stdout)
    many = EXAMPLE.with_name("llama3-70b-64-gpus.toml")
    traced = json.loads(run(many, "--from-trace", TRACE, "--nodes", "16", "--json", "-").stdout)
    assert given["step_us"] == given["observed"]["step_us"] == pytest.approx(45e6)
    assert traced["observed"]["step_us"] < 1e6
    assert traced["step_us"] < traced["observed"]["step_us"]
    assert traced["interval"]["low_us"] < traced["step_us"] < traced["interval"]["high_us"]


TOPOLOGY = """SwitchName=leaf1 Nodes=n[1-4]
SwitchName=leaf2 Nodes=n[5-8]
SwitchName=spine Switches=leaf[1-2]
"""
PIPELINE: list[str | Path] = [
    EXAMPLE.with_name("llama3-70b-64-gpus.toml"),
    *("--set", "parallel.pp=4", "--set", "parallel.dp=2", "--set", "parallel.zero=1"),
]


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    path = tmp_path / "topology.conf"
    path.write_text(TOPOLOGY)
    return path


def test_a_placement_costs_less_than_hosts_in_a_bad_order(topology: Path) -> None:
    """Neighbouring stages under one leaf, where the launcher's order has them under two."""
    done = run(*PIPELINE, "--topology", topology, "--hosts", "n1,n5,n2,n6,n3,n7,n4,n8", "--json", "-")
    orders = {order["name"]: order["cost"] for order in json.loads(done.stdout)["placement"]["orders"]}
    assert orders["found"] < 0.99 * orders["in order"]
    assert orders["found"] < 0.7 * orders["random"]


def test_launch_files_are_written(topology: Path, tmp_path: Path) -> None:
    """To a folder that is made: as many lines as ranks, and how each is used is printed."""
    done = run(*PIPELINE, "--topology", topology, "--launch-files", tmp_path / "made" / "here")
    assert done.returncode == 0
    assert len((tmp_path / "made" / "here" / "slurm_hostfile").read_text().splitlines()) == 64
    assert "SLURM_HOSTFILE=slurm_hostfile srun" in done.stdout


def test_a_page_with_a_placement(topology: Path, tmp_path: Path) -> None:
    assert run(*PIPELINE, "--topology", topology, "--html", tmp_path / "page.html").returncode == 0
    assert "Where the ranks should be" in (tmp_path / "page.html").read_text()


def test_a_yaml_bomb_ends_in_one_line(tmp_path: Path) -> None:
    lines = ["- &a0 [lol]", *(f"- &a{k} [{', '.join(9 * [f'*a{k - 1}'])}]" for k in range(1, 10))]
    (tmp_path / "topology.yaml").write_text("\n".join(lines))
    done = run(*PIPELINE, "--topology", tmp_path / "topology.yaml")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "anchors, aliases and tags are not read" in done.stderr


def test_one_of_several_topologies_is_chosen(tmp_path: Path) -> None:
    text = "".join(
        f"- topology: {name}\n  block:\n    blocks:\n    - block: b\n      nodes: {name}[1-8]\n" for name in "ab"
    )
    (tmp_path / "topology.yaml").write_text(text)
    done = run(*PIPELINE, "--topology", tmp_path / "topology.yaml", "--topology-name", "b", "--json", "-")
    assert set(json.loads(done.stdout)["placement"]["host_of"]) == {f"b{k}" for k in range(1, 9)}


def test_yaml_without_its_extra_says_what_to_install() -> None:
    probe = (
        "import sys; sys.modules['yaml'] = sys.modules['scipy'] = None\n"
        "from counterpoint.errors import Unsupported\n"
        "from counterpoint.plan.placement import place, read_slurm\n"
        "try:\n    read_slurm.read_yaml('', gpus=8)\nexcept Unsupported as error:\n    print(error)\n"
    )
    done = program([sys.executable, "-c", probe])
    assert done.stdout == "topology.yaml needs PyYAML, which is not installed: pip install 'counterpoint[plan]'\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "n[1-8]"], "--topology-name, --hosts and --launch-files are about --topology"),
        (["--topology", "TOPOLOGY", "--hosts", "n[1-3]"], "64 ranks on 3 hosts of 8 GPUs: give 8 hosts"),
        (["--topology", "TOPOLOGY", "--hosts", "n[1-7],m1"], "m1"),
        (["--topology", "TOPOLOGY", "--launch-files", "/dev/null/files"], "/dev/null is no folder"),
        (["--topology", "/nowhere.conf"], "/nowhere.conf"),
        (["--topology", "TOPOLOGY", "--topology-name", "a"], "only topology.yaml has several topologies"),
    ],
)
def test_a_placement_that_cannot_be(topology: Path, arguments: list[str], said: str) -> None:
    done = run(*PIPELINE, *(str(topology) if each == "TOPOLOGY" else each for each in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
