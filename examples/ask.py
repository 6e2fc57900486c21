"""Ask a running server, and see how many tokens of each prompt it knew already, and from where.

python examples/ask.py http://127.0.0.1:8000 examples/prompts.jsonl

Waits until the server is up. A line of the file is {"prompt": "..."} or {"messages": [...]}.
Who has given a key to the server by VLLM_API_KEY sets that here, too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

UP_S = 1800
SAY_S = 30


def get(url: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(answer.read().decode())


def wait_until_up(server: str) -> None:
    begin = time.monotonic()
    say_at = 0.0
    while True:
        try:
            get(f"{server}/health")
            return
        except OSError as error:
            waited = time.monotonic() - begin
            if waited > UP_S:
                sys.exit(f"no server answers at {server}: {error}")
            if waited >= say_at:
                said = f"waiting for {server} ({waited:.0f} s): its output shows its progress"
                print(said, file=sys.stderr)
                say_at = waited + SAY_S
            time.sleep(0.5)


def hits(server: str) -> dict[str, int]:
    """How many blocks each tier has given so far, from the server's metrics."""
    time.sleep(0.8)  # the engine tells its counters twice a second
    sample = r'^kvtier:hit_blocks_total\{.*tier="(\w+)".*\} (\S+)$'
    found = re.findall(sample, get(f"{server}/metrics"), re.MULTILINE)
    total: Counter[str] = Counter()
    for tier, value in found:  # once for each engine of the server
        total[tier] += int(float(value))
    return total


def main(server: str, file: Path) -> None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"{file}: {error.strerror}")
    wait_until_up(server)
    model = json.loads(get(f"{server}/v1/models"))["data"][0]["id"]
    for number, line in enumerate(filter(str.strip, lines), 1):
        request: dict[str, Any] = json.loads(line)
        path = "chat/completions" if "messages" in request else "completions"
        before = hits(server)
        begin = time.monotonic()
        body = {"model": model, "max_tokens": 8, "temperature": 0} | request
        usage = json.loads(get(f"{server}/v1/{path}", body))["usage"]
        seconds = time.monotonic() - begin
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        now = hits(server)
        given = [f"{now[tier] - before.get(tier, 0)} blocks from {tier}" for tier in now]
        where = ", ".join(each for each in given if not each.startswith("0 "))
        print(
            f"prompt {number}: {usage['prompt_tokens']} tokens, {cached} cached "
            f"({where or 'none from kvtier'}), {seconds:.2f} s"
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        address = sys.argv[1].rstrip("/")
        main(address if "://" in address else f"http://{address}", Path(sys.argv[2]))
    except HTTPError as error:
        sys.exit(f"{error.url} answers {error.code}: {error.read().decode()}")
    except KeyboardInterrupt:
        sys.exit(130)
