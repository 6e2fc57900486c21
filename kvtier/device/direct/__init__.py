"""Reads from files straight into device memory, past host memory.

- `loader`: reads, verifies, places and reports records; it drives any `DirectDriver`.
- `kvikio_driver`: the driver for GPUDirect Storage, and whether this machine has it.
"""
