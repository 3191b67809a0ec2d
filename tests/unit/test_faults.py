"""Faults that recorders plant (examples/faults.py): those that need no GPU to be seen."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import faults


def planted(*options: str, kinds: tuple[str, ...] = (*faults.KINDS, *faults.OF_EXPERTS)) -> faults.Fault:
    parser = argparse.ArgumentParser()
    faults.add_arguments(parser, kinds)
    return faults.Fault.from_arguments(parser.parse_args(options), rank=0, world_size=8, warmup=0, steps=3)


def test_tokens_of_all_ranks_prefer_the_experts_of_one() -> None:
    """Of 4 ranks with 4 experts each the third gets most choices, on a rank that is not at fault itself."""
    torch.manual_seed(0)
    router, x = nn.Linear(8, 16, bias=False), torch.randn(500, 8)
    before = router(x).topk(2).indices // 4
    planted("--fault", "hot_experts", "--fault-rank", "2").plant_in_routers([router], 4)
    after = router(x).topk(2).indices // 4
    even, hot = (torch.bincount(each.flatten(), minlength=4)[2].item() for each in (before, after))
    assert even < 350
    assert hot > 700


def test_without_it_routers_stay() -> None:
    router, x = nn.Linear(8, 16, bias=False), torch.randn(5, 8)
    wanted = router(x)
    planted("--fault", "host_stall").plant_in_routers([router], 4)
    assert torch.equal(router(x), wanted)


def test_a_model_without_experts_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planted("--fault", "hot_experts", kinds=faults.KINDS)
    assert "invalid choice: 'hot_experts'" in capsys.readouterr().err
