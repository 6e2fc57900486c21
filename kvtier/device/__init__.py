"""Copies between an engine's KV tensors and records in host memory. Knows core, never vLLM.

- `copier`: what a copier is given and answers, and what it asks of a device with streams, of which
  `cuda` is one. Read it first.
- `layout`: an engine's tensors in numbers, and which bytes go where.
- `records`: where a rank's parts of records lie; what verifies and seals them.
- `regroup`: how a rank's part is made of parts that another number of ranks has written.
- `queue`: jobs in, batches out, results back, between the engine and the copier's threads; and the
  copier, as the engine knows it.
- `cpu`: the copier for an engine whose tensors lie in host memory; `host_kernels`: its copies with
  a checksum in one pass, built for this processor.
- `host_copies`: jobs of that copier for engines that keep host memory of their own.
- `pacing`: when an engine leaves room, for pinning and for stores.
- `pinned`: host memory that a device reaches directly.
- `direct`: reads from files straight into device memory (GPUDirect Storage).
"""
