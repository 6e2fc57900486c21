"""Blocks copied into a tier, a store or a file; the work is in `kvtier.cli.copying`."""
