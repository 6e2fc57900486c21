"""The copier for CUDA devices.

- `cuda_device`: streams, events, pinning and batched copies, through torch.
- `copier`: the copier itself; `staged_copies` moves its batches by way of `staging_buffers`.
- `kernels`: Triton kernels that gather, scatter and check pages. `kernel_launch` launches them
  without Triton's overhead, `kernel_trial` tries them before any block is trusted to them.
"""
