"""Reads from files straight into device memory, past host memory.

- `loader`: reads, proves, and reports records; it drives any `DirectDriver`.
- `kvikio_driver`: the driver for GPUDirect Storage; `gds_probe` tells whether this machine has it.
- `copies`: what was read, into place among the engine's tensors.
"""
