"""What `tune` chose as files of Bash: sourced in a shell, they set what was chosen and run nothing else."""

import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.tuning.exporters import export
from tests.support.example_tuned import example_tuned, hostile_tuned, tuned_pair


def sourced(text: str, folder: Path, *show: str) -> list[str]:
    """The lines that Bash prints for `show` after it has sourced a file, with nothing in its environment."""
    file = folder / "exported.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    script = f". ./{file.name}; printf '%s\\n' " + " ".join(show)
    done = subprocess.run(["bash", "-euc", script], cwd=folder, env={}, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_runs_nothing_of_a_hostile_name(tmp_path: Path) -> None:
    sourced(export(hostile_tuned(), "env"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["exported.sh"]


def test_variables_of_nccl_are_those_of_the_choice(tmp_path: Path) -> None:
    text = export(replace(example_tuned(), pair=(tuned_pair("nccl+max_ctas=8+cga_cluster=2+priority=high"),)), "env")
    shown = ("$NCCL_MAX_CTAS", "$NCCL_CGA_CLUSTER_SIZE", "$TORCH_NCCL_HIGH_PRIORITY", "$COUNTERPOINT_TUNED")
    assert sourced(text, tmp_path, *shown) == ["8", "2", "1", "counterpoint.toml"]


@pytest.mark.parametrize("file", ["tuned 2.toml", '$(touch pwned)}`x`\\".toml', "ä.toml"])
def test_the_file_is_called_by_its_own_name(file: str, tmp_path: Path) -> None:
    """Whatever characters that has, and nothing of it is run."""
    assert sourced(export(example_tuned(), "env", file), tmp_path, '"$COUNTERPOINT_TUNED"') == [file]
    assert [path.name for path in tmp_path.iterdir()] == ["exported.sh"]
