"""Code for CUDA, run without a CUDA device.

Fake tensors (``torch._subclasses.fake_tensor``) say ``device="cuda"`` and hold no data. So a whole training step runs the
path that it takes on a GPU: a tensor on the wrong device fails, and a dispatch mode counts what would be launched and names
what would make the host wait.

Not seen here: numbers, NCCL, kernels that are missing on CUDA only. Tests marked ``gpu`` are for those.
"""
