"""The write budget of an NVMe folder.

- `write_ledger`: the file in which the engines that share a folder keep what is left of it.
- `leases`: how much of that an engine holds, so that its scheduler asks nobody.
- `metered_tier`: a tier that tells what is being written.
- `drive_counters`: what the drive itself says was written, by nvme-cli.
- `inspection`: what `du` and `doctor` show of it.
"""
