"""The block record, the same on every medium, and what a tier tells of its blocks.

- `record`: the 4 KiB header, the payload and its checksums (docs/reference/format.md).
- `compression`: codecs, by name in settings and by number in headers.
- `tier_events`: what became visible or vanished, for vLLM's KV events.
"""
