"""The copier for CUDA devices.

- `cuda_device`: streams, events and pinning, through torch.
- `cuda_runtime`: the CUDA runtime in this process; `runtime_copies` are its batched copies.
- `copier`: the copier itself; `staged_copies` moves its batches by way of `staging_buffers`.
- `kernels`: builds and launches the Triton kernels: `page_kernels` gather and scatter pages,
  `checksum_kernels` check them. `kernel_launch` launches without Triton's overhead, `kernel_trial`
  tries the kernels before any block is trusted to them.
- `batch_copies`: many copies in calls of bounded length.
"""
