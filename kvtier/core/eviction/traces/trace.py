"""Traces of requests: what to replay against a policy, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.core.system.disk import read_bounded
from kvtier.errors import ConfigError

_BLOCK_MAX = 1 << 63
_BYTES_MAX = 1 << 30
_LINE_FORM = '{"timestamp": 27000, "hash_ids": [0, 1, 2]}'


class Request(NamedTuple):
    """When, in seconds, and the numbers of the prompt's blocks, the head of the prefix first."""

    time: float
    blocks: tuple[int, ...]


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Read a trace in the form of the Mooncake traces: a JSON object a line, with the `timestamp`
    in milliseconds and the `hash_ids` of the prompt's blocks; other fields are not looked at."""
    try:
        lines = read_bounded(path, _BYTES_MAX).splitlines()
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", "name the file of a trace"
        ) from error
    decoder = msgspec.json.Decoder(_Line)
    requests: list[Request] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path}:{number}", f"no request of a trace: {error}", f"like {_LINE_FORM}"
            ) from error
        blocks = tuple(dict.fromkeys(line.hash_ids))
        if blocks and not 0 <= min(blocks) <= max(blocks) < _BLOCK_MAX:
            raise ConfigError(
                f"{path}:{number}", "a block number is out of range", "use 0 to 2**63 - 1"
            )
        requests.append(Request(line.timestamp / 1000, blocks))
    if not requests:
        raise ConfigError(str(path), "holds no request", f"write lines like {_LINE_FORM}")
    requests.sort(key=lambda request: request.time)
    return requests
