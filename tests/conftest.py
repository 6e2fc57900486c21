"""For all tests: property tests take the same examples every time, and as long as they need."""

from hypothesis import settings

settings.register_profile("kvtier", deadline=None, derandomize=True)
settings.load_profile("kvtier")
