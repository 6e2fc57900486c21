"""One place where kvtier touches what vLLM does not promise."""

from __future__ import annotations

import sys

import msgspec

Version = tuple[int, int]
"""The first two numbers of a version."""

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
ISSUES = "https://github.com/vllm-project/vllm/issues/"


class TouchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A class or a module of vLLM's, and what kvtier relies on in it."""

    target: str
    """`module:Class`, or a module."""
    members: tuple[str, ...]
    """Names that must be there. With parentheses: a function whose parameters begin with these."""
    used_by: str
    """The file of this folder that touches it."""
    why: str
    without_it: str
    """What would go wrong."""
    since: Version = (0, 0)
    """Only from this version on; in all of them, if none is said."""
    until: Version = (sys.maxsize, 0)
    """Only up to this version: later ones need it no more."""
    derived: bool = False
    """A class of kvtier derives from it: it must ask for no method that is not in `members`."""
    upstream: str = ""
    """The issue, if there is one."""
