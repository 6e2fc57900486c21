"""Copies between an engine's KV tensors and records in host memory. Knows core, never vLLM.

- `copier`: what a copier is asked and answers. Read it first.
- `layout`, `copy_plan`: an engine's tensors in numbers, and which bytes go where.
- `job_queue`: jobs in, batches out, results back, between the engine and the copier's threads.
- `job_batches`: a job under way, and the batches that are cut from it.
- `load_proofs`: whether records are those that a load wants, for many at once.
- `cpu_copier`: the copier for an engine whose tensors lie in host memory.
- `host_kernels`, `host_kernel_code`: copies with a checksum in one pass, built for this processor;
  `xxh3_constants` has the numbers that these and a GPU's kernels share.
- `accelerator`: what a device with streams offers; `cuda` is one.
- `idle_times`, `store_pace`: when an engine rests, and how much of its time stores may have.
- `pinned_memory`: host memory that a device reaches directly.
- `direct`: reads from files straight into device memory (GPUDirect Storage).
"""
