"""Options of a communicator: which must be equal on all ranks."""

import pytest

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.machine.profile import default_profile


@pytest.mark.parametrize("on_gpu", [True, False])
def test_ranks_agree_on_sharing_a_gpu(on_gpu: bool) -> None:
    shared = CommunicatorOptions(share_gpu=True).shared(on_gpu=on_gpu, profile=default_profile())
    assert shared.get("share_gpu") == (True if on_gpu else None)
