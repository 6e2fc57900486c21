"""How large the model, the caches and the requests of `benchmarks.serve` are; all but the model's
sizes in tokens."""

from __future__ import annotations

import os
from typing import NamedTuple

LAYERS = int(os.environ.get("LAYERS", "4"))
HIDDEN = int(os.environ.get("HIDDEN", "512"))
OWN = 16 << 10
"""What the engine's own cache holds."""
MEMORY = 192 << 10
"""What CPU memory holds, but for `thirty_users`, who get a quarter of what they need."""
LONGEST, STEP = 4096, 2048
BLOCK = 64
"""Of the engine's cache, and so many tokens for each block of the trace."""
PREFIX, SUFFIX = 1024, 64
DECODED = 16


class Chats(NamedTuple):
    """Chats of the multi-turn script, so many of them at a time."""

    chats: int
    users: int
    turns: int
    first: int
    """Tokens before the first message."""
    more: int
    """Tokens of each message."""


CHATS = Chats(24, 12, 8, 1280, 256)
THIRTY_USERS = Chats(30, 30, 20, 1024, 96)
