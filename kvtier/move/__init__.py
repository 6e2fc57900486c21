"""Movers: they carry transfers out between the handlers of two tiers.

- `threads`: on threads of this process, for the command line and inside the mover's process.
- `process`: in a process of its own, for serving; `process_main` runs in it, `protocol` is what the
  two say to each other.
- `queues`: how much is admitted, transfers cut into batches, and who does what next.
"""
