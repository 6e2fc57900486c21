"""A server that tells metrics as vLLM with kvtier does, of a cache that works at a steady pace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STARTED = 1_000_000.0
KINDS = ("cpu", "nvme", "object")
HITS = {"cpu": 2.0, "nvme": 0.5, "object": 0.25}
"""Blocks that each tier gives a second."""


class Server(ThreadingHTTPServer):
    """`seconds` after the start, of its own clock; `text` in place of all, if it is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seconds = 600.0
        self.text: str | None = None
        self.model = "./small"

    def metrics(self) -> str:
        if self.text is not None:
            return self.text
        return metrics(self.seconds, self.model)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.server.metrics().encode()
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    """A server on a free port until the end of the block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def metrics(seconds: float, model: str = "./small") -> str:
    """What is told so long after the start."""
    lines = [
        "# HELP kvtier:blocks Blocks that a tier holds",
        f"process_start_time_seconds {STARTED}",
    ]

    def tell(name: str, value: float, **labels: str) -> None:
        named = {"engine": "0", "model_name": model, **labels}
        pairs = ",".join(f'{label}="{each}"' for label, each in named.items())
        lines.append(f"{name}{{{pairs}}} {value}")

    for source, a_second in (
        ("local_compute", 500),
        ("local_cache_hit", 200),
        ("external_kv_transfer", 300),
    ):
        tell("vllm:prompt_tokens_by_source_total", a_second * seconds, source=source)
    tell("vllm:num_requests_running", 3)
    tell("vllm:num_requests_waiting", 5)
    tell("vllm:kv_offload_store_bytes_total", 4e6 * seconds)
    tell("kvtier:queued_blocks", 12)
    for at, kind in enumerate(KINDS):
        tell("kvtier:bytes_used", [1 << 30, 48 << 30, 1 << 40][at], tier=kind)
        tell("kvtier:bytes_capacity", [1 << 30, 64 << 30, 2 << 40][at], tier=kind)
        tell("kvtier:blocks", 700 * (at + 1), tier=kind)
        tell("kvtier:retained_blocks", 9 if kind == "nvme" else 0, tier=kind)
        tell("kvtier:tier_down", int(kind == "object"), tier=kind)
        tell("kvtier:hit_blocks_total", HITS[kind] * seconds, tier=kind)
        tell("kvtier:hit_bytes_total", 2e6 * HITS[kind] * seconds, tier=kind)
        if at:
            tell("kvtier:written_bytes_total", 3e6 * HITS[kind] * seconds, tier=kind)
            tell("kvtier:waiting_blocks", 31 * at, tier=kind)
        tell("kvtier:corrupt_blocks_total", 2 if kind == "nvme" else 0, tier=kind)
    tell("kvtier:store_drops_total", seconds // 10, tier="object", reason="full")
    for prompt, mean, tokens in (("loaded", 0.12, 4000), ("computed", 0.96, 2000)):
        tell("kvtier:first_token_seconds_sum", mean * seconds, prompt=prompt)
        tell("kvtier:first_token_seconds_count", seconds, prompt=prompt)
        tell("kvtier:first_token_prompt_tokens_total", tokens * seconds, prompt=prompt)
    tell("kvtier:missed_tokens_total", 5 * seconds, reason="never stored")
    return "\n".join(lines) + "\n"
