"""kvtier inside SGLang: HiCache keeps pages of its host memory in a stack's tiers.

Importing this package imports neither SGLang nor torch; `storage` imports both.

- `storage.py`: the class that SGLang loads as its storage backend, in SGLang's words
- `pages.py`: pages of host memory on their way to and from the tiers, and their deadlines
- `identity.py`: what makes pages interchangeable, and what is refused
"""

from __future__ import annotations

TESTED = ("0.5.23",)
"""Versions of SGLang on which kvtier's tests have run."""
