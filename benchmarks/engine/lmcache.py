"""First tokens of kvtier beside LMCache, in turns: from CPU memory, from disk, and after kills.

    make bench-lmcache      # TOKENS=1024,8193,8000 LAYERS=16 HIDDEN=1024 ROUNDS=5

LMCache runs in its multi-process mode: `lmcache server`, and engines with LMCacheMPConnector. An
engine of each kind and one without a cache live at the same time. What lies on disk leaves the page
cache before each turn from there. The figure is LMCache's time over kvtier's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from engines.engine import Engine

from benchmarks.engine.served import DTYPE, HOST, Served, folders
from benchmarks.report import Report
from kvtier.testing.subject import SHARED

TOKENS = [int(each) for each in os.environ.get("TOKENS", "1024,8193,8000").split(",")]
LAYERS = int(os.environ.get("LAYERS", "16"))
HIDDEN = int(os.environ.get("HIDDEN", "1024"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
TRANSFERS = os.environ.get("TRANSFERS", "lmcache_driven")
"""LMCache's server copies from and to its engine's memory, or (`engine_driven`) the engine does."""
PORT, HTTP_PORT = 15555, 18080
LMCACHE_HOST = HOST.with_name("stopwatch_lmcache.py")
_READY_S = 120.0
_WRITTEN_S = 60.0
_AHEAD = 1.5
"""How far kvtier is to be ahead where nothing is computed."""


class Peer:
    """`lmcache server`, with memory and a folder."""

    def __init__(self, folder: Path) -> None:
        self.blocks = folder / "lmcache"
        self.blocks.mkdir(exist_ok=True)
        self._log = folder / "lmcache.log"
        self.start()

    def start(self) -> None:
        adapter = {"type": "fs", "base_path": str(self.blocks)}
        command = [
            *(str(Path(sys.executable).with_name("lmcache")), "server"),
            *("--port", str(PORT), "--http-port", str(HTTP_PORT), "--chunk-size", "256"),
            *("--l1-size-gb", "2", "--l1-init-size-gb", "2", "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
            *("--l2-adapter", json.dumps(adapter)),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"lmcache server does not start:\n{self._end_of_log()}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{_url()}/healthcheck", timeout=2).status == 200)
        return False

    def empty_memory(self) -> None:
        """What is on disk stays."""
        request = urllib.request.Request(f"{_url()}/cache/clear", method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def settle(self, tokens: int) -> None:
        """Wait until the files of a prompt of so many tokens have ceased to come."""
        before, end = -1, time.monotonic() + _WRITTEN_S
        while time.monotonic() < end:
            now = sum(path.stat().st_size for path in self.blocks.rglob("*") if path.is_file())
            if now == before and now:
                return
            before = now
            time.sleep(1.0)
        raise SystemExit(f"lmcache writes nothing of {tokens} tokens:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Bench(Served):
    """Engines without a cache, with kvtier, and with LMCache."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.report = Report(f"beside LMCache, {DTYPE}, {LAYERS} layers, hidden {HIDDEN}")

    def kvtier(self) -> Engine:
        stack = self.stack(self.cpu("2GiB"), self.nvme("4GiB"), load_policy="always")
        return self.start(stack, max(TOKENS))

    def lmcache(self) -> Engine:
        extra = {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": PORT,
            "lmcache.mp.mp_transfer_mode": TRANSFERS,
        }
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        return self.start(None, max(TOKENS), host=LMCACHE_HOST, transfer=transfer)

    def drop_page_cache(self) -> None:
        """Of all files of both caches: what is read next comes from the disk."""
        os.sync()
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def _url() -> str:
    return f"http://127.0.0.1:{HTTP_PORT}"


def main() -> None:
    with folders() as (folder, region), _serving(folder) as peer:
        bench = Bench(folder, region)
        prompts = {tokens: bench.prompt(tokens) for tokens in TOKENS}
        with bench.start(None, max(TOKENS)) as plain:
            with bench.kvtier() as ours, bench.lmcache() as theirs:
                for engine in (plain, ours, theirs):
                    engine.first_token(prompt=bench.prompt(600))
                for tokens, prompt in prompts.items():
                    alive(bench, peer, (plain, ours, theirs), tokens, prompt)
            killed(bench, peer, prompts)
        bench.report.finish()


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[Peer]:
    peer = Peer(folder)
    try:
        yield peer
    finally:
        peer.kill()
        for path in SHARED.glob("lmcache_kv_*"):  # of engines and servers that were killed
            path.unlink(missing_ok=True)


def alive(
    bench: Bench, peer: Peer, engines: tuple[Engine, Engine, Engine], tokens: int, prompt: list[int]
) -> None:
    """From memory and from disk, turn by turn."""
    _, ours, theirs = engines
    cold = [engine.first_token(prompt=prompt)["seconds"] for engine in engines]
    bench.report.add(f"{tokens} tokens, without a cache", cold[0], "s")
    ours.settle()
    theirs.settle()
    peer.settle(tokens)
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS):
        for source in ("memory", "disk"):
            contestants: list[tuple[str, Any]] = [("kvtier", ours), ("LMCache", theirs)]
            for name, engine in contestants if turn % 2 else reversed(contestants):
                if source == "disk":
                    ours.clear(tier=0) if engine is ours else peer.empty_memory()
                    bench.drop_page_cache()
                engine.forget_engine_cache()
                found.setdefault((source, name), []).append(_hit(engine, prompt, name, source))
    for source in ("memory", "disk"):
        _compare(bench.report, f"{tokens} tokens, from {source}", found, source, tokens)


def killed(bench: Bench, peer: Peer, prompts: dict[int, list[int]]) -> None:
    """The first hit of an engine that was killed alone, and of one of which all was killed."""
    for what in ("engine killed", "all killed"):
        found: dict[tuple[str, str], list[float]] = {}
        for tokens, prompt in prompts.items():
            for name in ("kvtier", "LMCache"):
                if what == "all killed" and name == "LMCache":
                    peer.kill()
                    peer.start()
                    bench.drop_page_cache()
                with bench.kvtier() if name == "kvtier" else bench.lmcache() as engine:
                    engine.first_token(prompt=bench.prompt(600))
                    source = f"{what} {tokens}"
                    found[source, name] = [_hit(engine, prompt, name, what)]
            _compare(bench.report, f"{tokens} tokens, {what}", found, f"{what} {tokens}", tokens)


def _hit(engine: Engine, prompt: list[int], name: str, source: str) -> float:
    found = engine.first_token(prompt=prompt)
    if found["cached"] < len(prompt) - 512:
        raise SystemExit(f"{name}, {source}: only {found['cached']} of {len(prompt)} tokens cached")
    return float(found["seconds"])


def _compare(
    report: Report, text: str, found: dict[tuple[str, str], list[float]], source: str, tokens: int
) -> None:
    ours, theirs = (median(found[source, name]) for name in ("kvtier", "LMCache"))
    report.add(f"{text}: kvtier", ours, "s")
    report.add(f"{text}: LMCache", theirs, "s")
    ratio = f"{text}: LMCache over kvtier"
    if (tokens - 1) % 256:  # the rest is computed
        report.add(ratio, theirs / ours, "x")
    else:
        report.at_least(ratio, theirs / ours, "x", _AHEAD)


if __name__ == "__main__":
    main()
