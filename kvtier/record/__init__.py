"""A block as it lies on every medium: `record` is its header and checksums, `codec` packs it."""
