"""Fixed slots behind a table: the catalogue that the CPU and the NVMe tier share."""
