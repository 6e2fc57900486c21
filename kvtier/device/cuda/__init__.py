"""The copier for CUDA devices.

- `device`: the device through torch, its streams, pinning, and how a copier is opened.
- `runtime`: the CUDA runtime in this process: events, batched copies, and kernels launched without
  Triton's overhead.
- `copier`: the copier, and how a batch moves: by way of `staging_buffers` or page by page.
- `kernels`: the Triton kernels that gather, scatter and check pages.
"""
