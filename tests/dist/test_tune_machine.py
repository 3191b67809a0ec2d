"""A machine without GPUs is measured into a profile: real ranks over gloo and threads."""

from pathlib import Path

import pytest

from counterpoint.machine.profile import VARIABLE, Profile, profile_json, profile_of
from counterpoint.tuning.machine import FITS, tune_machine
from tests.dist import collective_programs as programs
from tests.support.command import HANG_S
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def found() -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        return tune_machine(device="cpu", timeout_s=HANG_S)


def test_every_group_is_measured_or_says_why_not(found: Profile) -> None:
    """A busy machine may have times that no line goes through; these groups never depend on that."""
    measured = {group for group in (*FITS, "mechanisms") if found.measured_on[group] == found.gpu}
    assert measured | found.left_out.keys() == {*FITS, "mechanisms"}
    assert (found.gpu, measured >= {"rates", "nccl", "efficiency"}) == ("CPU", True)


def test_the_file_is_the_profile_of_a_cpu(found: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_bytes(profile_json(found))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert profile_of(None) == found


def test_a_communicator_goes_by_it(two_ranks: Ranks, found: Profile) -> None:
    assert ["profile: measured on CPU" in text for text in two_ranks.run(programs.repr_with, found)] == [True, True]
