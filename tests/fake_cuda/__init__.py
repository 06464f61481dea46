"""CUDA code paths, run without a CUDA device.

Fake tensors (``torch._subclasses.fake_tensor``) report ``device="cuda"`` and have no data. So a full training step takes the
same path as on a GPU: a tensor on the wrong device fails, and a dispatch mode counts launches and reports host-device syncs.

Tests marked ``gpu`` cover numbers, NCCL, and kernels that are missing only on CUDA.
"""
