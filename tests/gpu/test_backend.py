"""Backend `counterpoint` and DDP on all GPUs of this machine (2 to 8), beside NCCL."""

import pytest

from tests.support.gpu_ranks import Seen, of

pytestmark = pytest.mark.gpu(2)

RUN = {"timeout_s": 200}


@pytest.mark.parametrize(
    ("scenario", "what", "wanted"),
    [
        ("calls", "wrong", "0"), ("calls", "taken", "True"), ("tensor parallel", "close", "True"),
        ("tensor parallel", "taken", "True"), ("compiled", "equal", "True"), ("compiled", "taken", "6"),
        ("captured", "value", "as it should be"), ("ended", "right", "True"),
    ],
)  # fmt: skip
def test_what_comes_out_is_nccls(seen: Seen, scenario: str, what: str, wanted: str) -> None:
    """Calls of 4 KiB to 64 MiB, tensor parallelism, functional collectives in one graph, graphs, groups that end."""
    assert of(seen, scenario, what) == {wanted}


def test_ddp_trains_as_by_nccl(seen: Seen) -> None:
    """Between two ranks bit by bit; buckets of the registered model and of `overlap` are written in place."""
    for rank in seen:
        told = rank["data parallel"]
        if len(seen) == 2:
            assert told["equal"] == "['stock', 'backend', 'registered', 'overlap']"
        assert told["in place"] == "True"
        assert " 0 buckets in place" not in told["overlap"]
