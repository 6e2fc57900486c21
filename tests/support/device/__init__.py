"""Devices without a device: layouts, streams, direct reads, and an engine around them."""
