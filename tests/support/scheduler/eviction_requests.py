"""Keys and requests that the tests of eviction share."""

from __future__ import annotations

import random

from kvtier.cli.trace_simulation import Request


def keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in range(first, first + count)]


def chats(
    dice: random.Random, count: int, length: int = 10, stay: float = 0.6, pause: float = 60.0
) -> list[Request]:
    """Conversations that begin one a second; every turn adds a block, after a pause."""
    requests: list[Request] = []
    number = 0
    for start in range(count):
        now = float(start)
        blocks = tuple(range(number, number + length))
        number += length
        requests.append(Request(now, blocks))
        while dice.random() < stay:
            now += pause * dice.uniform(0.8, 1.2)
            blocks = (*blocks, number)
            number += 1
            requests.append(Request(now, blocks))
    return sorted(requests)
