"""Run CUDA code paths without a CUDA device.

Fake tensors (``torch._subclasses.fake_tensor``) report ``device="cuda"`` and contain no data. A training step on fake tensors
runs the code for a GPU. A tensor on the wrong device is an error, and a dispatch mode counts launches and host-device syncs.

Tests marked ``gpu`` need a real GPU. They check numerical results, NCCL, and whether CUDA has all kernels.
"""
