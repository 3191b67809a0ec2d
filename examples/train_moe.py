"""Train a small mixture of experts, whose tokens travel beside the experts' matmuls with `--overlap`.

It is train_fsdp.py with experts that are divided among ranks. All else is sharded by FSDP2 over all ranks; where
`--ep` is fewer than all, FSDP2 shards the experts as well, over the ranks that have the same ones. With `--graph` the
host launches two CUDA graphs a step, forward and backward, and waits for no kernel to be issued: FSDP2 moves weights
about, which graphs cannot follow, so that each rank has all of the model but the experts of others.

    torchrun --nproc-per-node 2 examples/train_moe.py --device cpu
    torchrun --nproc-per-node 2 examples/train_moe.py --device cpu --overlap --trace traces/overlap
    torchrun --nproc-per-node 4 examples/train_moe.py --device cpu --overlap --ep 2
    torchrun --nproc-per-node 8 examples/train_moe.py --overlap --shape qwen3 --tokens 8192
    torchrun --nproc-per-node 8 examples/train_moe.py --graph --shape qwen3 --tokens 8192
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from llama import Llama, Shape, rotary_table
from moe import MixtureOfExperts, MoeShape, Route, exchanged, moe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_fsdp import arguments, drawn, main, train

from counterpoint import expert_parallel

SHAPES = {
    "tiny": MoeShape(
        layers=4,
        hidden=128,
        ffn=96,
        heads=4,
        kv_heads=2,
        head_size=32,
        vocabulary=256,
        experts=8,
        top_k=2,
        shared_ffn=96,
    ),
    "qwen3": MoeShape(  # 4 of the 48 layers of Qwen3-30B-A3B
        layers=4, hidden=2048, ffn=768, heads=32, kv_heads=4, vocabulary=256, experts=128, top_k=8
    ),
    "mixtral": MoeShape(layers=2, vocabulary=256, experts=8, top_k=2),  # 2 of the 32 layers of Mixtral-8x7B
}


def overlapping(args: argparse.Namespace, shape: MoeShape, group: dist.ProcessGroup) -> Route:
    """Return what brings tokens to their experts by counterpoint, in parts; all layers share one dispatcher."""
    dispatcher = expert_parallel.Dispatcher(
        group,
        experts=shape.experts,
        top_k=shape.top_k,
        max_tokens=-(-args.tokens // args.parts),
        hidden=shape.hidden,
        options=expert_parallel.ExpertOptions(mechanism=args.mechanism, equal_tokens=True),
    )

    def route(
        x: Tensor, ids: Tensor, weights: Tensor, experts: expert_parallel.LocalExperts, shared: nn.Module | None
    ) -> Tensor:
        return expert_parallel.overlapped_moe(x, ids, weights, experts, dispatcher, parts=args.parts, shared=shared)

    return route


def expert_parallel_model(args: argparse.Namespace, shape: MoeShape, device: torch.device) -> Llama:
    """Build the model on the meta device, spread it over all ranks, then draw the weights shard by shard."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // args.ep, args.ep), mesh_dim_names=("copies", "experts"))
    group = mesh["experts"].get_group()
    route = overlapping(args, shape, group) if args.overlap else partial(exchanged, group=group)
    with torch.device("meta"):
        model = moe(shape, args.ep, route)
    shard(model, init_device_mesh(device.type, (ranks,)), mesh["copies"])
    return drawn(model, device)


def shard(model: Llama, dense: DeviceMesh, copies: DeviceMesh) -> None:
    """Shard the experts over the ranks that have the same ones, and all else over all ranks."""
    is_cuda = dense.device_type == "cuda"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if is_cuda else MixedPrecisionPolicy()
    for layer in model.layers:
        assert isinstance(layer.ffn, MixtureOfExperts)
        experts = fully_shard(layer.ffn.experts, mesh=copies, mp_policy=policy)
        experts.set_gradient_divide_factor(dense.size())  # the tokens of all ranks came to them, as to all else
        if copies.size() > 1:
            experts.set_force_sum_reduction_for_comms(True)  # only NCCL multiplies while it adds up
        fully_shard(layer, mesh=dense, mp_policy=policy)
    fully_shard(model, mesh=dense, mp_policy=policy)


def graphed_model(args: argparse.Namespace, shape: MoeShape, device: torch.device) -> Llama:
    """Build the model, bfloat16 on GPUs, with its experts divided among all ranks, and let graphs run it both ways."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    assert dist.group.WORLD is not None
    route = overlapping(args, shape, dist.group.WORLD)
    with torch.device("meta"):
        model = moe(shape, ranks, route)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    model.to_empty(device=device)
    same, own = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + rank))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02, generator=own if is_expert(name) else same)
    text = torch.zeros(1, args.tokens, dtype=torch.int64, device=device)
    sample = text, text.clone(), rotary_table(args.tokens, shape.head_dim, device)
    graphed: Llama = torch.cuda.make_graphed_callables(model, sample)  # type: ignore[assignment]
    for name, parameter in graphed.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(average, is_sum=is_expert(name)))
    return graphed


def is_expert(name: str) -> bool:
    """Whether a parameter is one of this rank's experts."""
    return ".experts.local." in name


def average(parameter: Tensor, *, is_sum: bool) -> None:
    """Make a gradient the mean over the tokens of all ranks; that of experts is the sum over them already."""
    assert parameter.grad is not None
    if not is_sum:
        dist.all_reduce(parameter.grad)
    parameter.grad.div_(dist.get_world_size())


def training(args: argparse.Namespace, device: torch.device) -> None:
    """Train; `train` has the one line, `counterpoint.overlap(model)`, for the collectives of FSDP2."""
    ranks = dist.get_world_size()
    args.ep = args.ep or ranks
    if ranks % args.ep or args.sizes.experts % args.ep:
        raise SystemExit(f"--ep {args.ep}: it has to divide {ranks} ranks and {args.sizes.experts} experts")

    if args.graph and (device.type != "cuda" or args.ep != ranks or args.overlap):
        raise SystemExit("--graph: it needs GPUs, the experts on all ranks (no --ep), and takes the place of --overlap")
    args.mechanism = args.mechanism or ("gather" if args.graph else "auto")
    make = graphed_model if args.graph else expert_parallel_model

    def build(shape: Shape, device: torch.device) -> Llama:
        assert isinstance(shape, MoeShape)
        return make(args, shape, device)

    train(args, device, build)


def arguments_of_moe() -> argparse.Namespace:
    """Read the command line."""
    return arguments(__doc__, SHAPES, on_gpu="qwen3", extend=_own_arguments)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ep", type=int, help="ranks among which the experts are divided: by default all")
    parser.add_argument("--parts", type=int, default=2, help="of the tokens of a layer, with --overlap")
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs, instead of --overlap")
    parser.add_argument(
        "--mechanism",
        choices=get_args(expert_parallel.ExpertChoice),
        help="with --overlap, by default auto, and with --graph, by default gather",
    )


if __name__ == "__main__":
    main(arguments_of_moe(), training)
