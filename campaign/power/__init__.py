"""Machine crashes, simulated: what was not synced may be there, or not, or in part.

- `recorder.c`: preloaded, it records every change that a process makes below a folder, in order.
- `recording`: reads such a record, and builds what a crash at any moment may leave of it.
"""
