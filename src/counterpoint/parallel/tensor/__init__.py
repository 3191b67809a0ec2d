"""Run matmuls of tensor parallelism that do not wait for their communication. Public as `counterpoint.tensor_parallel`.

`operations.py` has `torch.ops.counterpoint`, with fake tensors and autograd; `group.py` runs them for one process group
and counts which way calls went; `matmul.py` is one multiplication, of plain or scaled tensors.
"""
