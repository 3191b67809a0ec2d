"""The limit of files that are read as a whole, and errors that cross from one process to another."""

import pickle
from pathlib import Path

import pytest

from counterpoint.errors import CounterpointError, Misconfigured, NoEffect, PeerTimeout
from counterpoint.read_file import read_text


def test_a_file_may_be_as_large_as_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text("x = 'é'")
    size = path.stat().st_size
    assert read_text(path, limit=size, advice="give less") == "x = 'é'"
    with pytest.raises(Misconfigured, match=f"larger than {size - 1} bytes; give less"):
        read_text(path, limit=size - 1, advice="give less")


@pytest.mark.parametrize(
    "error", [NoEffect("gemm_sms=8", asked="8 SMs", seen="132", fix="use plain mm"), PeerTimeout("late", ranks=(3, 5))]
)
def test_an_error_of_another_process_is_the_same_error(error: CounterpointError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
