"""Movers: they carry transfers out between the handlers of two tiers.

- `thread_mover`: on threads of this process, for the command line and inside the mover's process.
- `process_mover`: in a process of its own, for serving; `process_connection` starts, hears and ends
  that process, `process_main` runs in it, `protocol` is what the two say to each other.
- `queues`: transfers cut into batches, and who does what next.
- `batch_carrier`: how one batch moves; `staging_buffers` are used if neither side is host memory.
- `transfer_counts`: how much is in flight, and the counters.
"""
