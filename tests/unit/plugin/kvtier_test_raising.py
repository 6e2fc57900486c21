"""A package that cannot be imported here, and does not say so by an ImportError."""

raise RuntimeError("no device is here")
