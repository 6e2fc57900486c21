"""What Linux says of a process's memory."""

from __future__ import annotations

import re
from pathlib import Path


def memory(what: str, pid: int | str = "self") -> int:
    """Bytes that it has of its own (RssAnon) or in all (VmRSS), or that it had at most (VmHWM);
    none if it has ended."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{what}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
