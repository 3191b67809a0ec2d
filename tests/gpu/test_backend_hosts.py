"""Backend `counterpoint` on 4 to 8 GPUs, two hosts of half of them: NCCL may take neither NVLink nor shared memory."""

import pytest

from tests.support.gpu_ranks import Seen, of

pytestmark = pytest.mark.gpu(4)

RUN = {"timeout_s": 400, "environment": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "multiple_of": 2}


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("alone", "none"), ("later", "none"), ("futures", "equal, completed True, error None"), ("streams", "0"),
        ("symmetric", "0 wrong, True"), ("paths", "hosts"),
    ],
)  # fmt: skip
def test_every_operation_is_right(seen: Seen, what: str, wanted: str) -> None:
    """From 1 to 256 MiB: at once, later, by futures, on several streams, in place; all of them over hosts."""
    assert of(seen, "hosts", what) == {wanted}
