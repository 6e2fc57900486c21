"""Servers on one disk and one bucket, for hours, with incidents."""
