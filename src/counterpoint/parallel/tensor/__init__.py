"""Run matmuls of tensor parallelism that do not wait for their communication. Public as `counterpoint.tensor_parallel`.

- `operations.py`: `torch.ops.counterpoint`, with fake tensors and derivatives.
- `group.py`: runs them for one process group, each call as `plans.py` planned its shape, and counts which way it went.
- `overlapped.py`: pieces beside the communication; `matmul.py`: one of them; `sums.py`: sums of the ranks' products.
- `flagged.py`: binds one matmul that polls for its rows, and counts what may leave; `flagged_kernels.py`: in Triton.
"""
