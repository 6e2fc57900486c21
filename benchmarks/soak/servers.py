"""What `benchmarks.soak` keeps running: servers on one disk and one bucket."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPException
from pathlib import Path

from support.object.object_servers import ACCESS_KEY, SECRET_KEY, ServerProcess, rclone

from kvtier.vllm import tiny_model
from kvtier.vllm.hooks.versions import SERVER
from kvtier.vllm.server_process import Server

MIB = 1 << 20
CPU_BYTES = 16 * MIB
DISK_BYTES = 96 * MIB
BUCKET_BYTES = 160 * MIB
THREADS = 8
_FLOOR_BYTES = 24 * MIB
_DISK_IMAGE_BYTES = 240 * MIB
_END_S = 90.0
_HANGS_S = 30.0
_FLAGS = ["--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024"]
_FLAGS += ["--num-gpu-blocks-override", "44", "--dtype", "float32", "--enforce-eager"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
}


class Places:
    """A disk of its own where it may be mounted, a bucket, memory, and what lies there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = Path(tempfile.mkdtemp(prefix="kvtier-soak-", dir="/dev/shm"))
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.mounted = self._mount()
        self.slabs = self.disk / "kvtier"
        self._ballast = self.disk / "ballast"
        beside = Path(sys.executable).with_name("rclone")
        found = beside if beside.exists() else Path(".venv/bin/rclone")
        self.store: ServerProcess | None = None
        self.bucket = folder / "data" / "bucket" / "kv"
        self.bucket.mkdir(parents=True)
        self.url = f"file://{self.bucket}"
        if found.exists():
            self.store = rclone(folder, found.absolute()).start()
            self.url = "s3://bucket/kv"

    def _mount(self) -> bool:
        image = self.folder / "disk.img"
        image.touch()
        os.truncate(image, _DISK_IMAGE_BYTES)
        commands: list[list[str | Path]] = [
            ["mkfs.ext4", "-q", "-F", image],
            ["mount", "-o", "loop", image, self.disk],
        ]
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                return False
        return True

    def stack(self, name: str) -> Path:
        """The file of one server's stack."""
        patience = {"load_deadline": "3s", "store_deadline": "10s"}
        cpu = {
            "kind": "cpu",
            "path": str(self.memory),
            "capacity": CPU_BYTES,
            "load_deadline": "3s",
        }
        floor = _FLOOR_BYTES if self.mounted else 0
        nvme = {"kind": "nvme", "path": str(self.slabs), "capacity": DISK_BYTES, **patience}
        nvme["free_floor"] = floor
        store = {"kind": "object", "url": self.url, "capacity": BUCKET_BYTES, **patience}
        store |= {"threads": THREADS, "audit": "1min", "refresh": "2s"}
        if self.store is not None:
            store |= {"endpoint": self.store.endpoint, "region": "us-east-1"}
        path = self.folder / f"{name}.yaml"
        tiers = [cpu, nvme, store]
        path.write_text(
            json.dumps(
                {"version": 1, "name": f"soak-{name}", "load_policy": "always", "tiers": tiers}
            )
        )
        return path

    def taken(self) -> dict[str, int]:
        """Bytes in each of them."""
        return {
            "memory": sum(status.st_blocks * 512 for _, status in _files_below(self.memory)),
            "disk": sum(status.st_size for _, status in _files_below(self.slabs)),
            "bucket": sum(status.st_size for _, status in _files_below(self.bucket)),
        }

    def fill_disk(self) -> None:
        """Leave no room on it."""
        with contextlib.suppress(OSError), self._ballast.open("wb") as file:
            while True:
                file.write(bytes(MIB))

    def empty_disk(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def slab_files(self) -> list[Path]:
        return [path for path, status in _files_below(self.slabs) if status.st_size >= MIB]

    def small_files(self) -> list[Path]:
        """Tables and the like: what says where things are."""
        return [path for path, status in _files_below(self.slabs) if status.st_size < MIB]

    def objects(self, kind: str) -> list[Path]:
        return [path for path, _ in _files_below(self.bucket) if f"/{kind}/" in str(path)]

    def close(self) -> None:
        if self.store is not None:
            self.store.kill()
        if self.mounted:
            subprocess.run(["umount", self.disk], check=False)
        shutil.rmtree(self.memory, ignore_errors=True)


def flip(path: Path, rng: random.Random, times: int) -> None:
    """Change bytes of a file, wherever."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(times if size else 0):
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def _files_below(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for below, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                path = Path(below, name)
                found.append((path, path.lstat()))
    return sorted(found)


class Peaks:
    """Weighs what lies in every place all the time, and keeps the most."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.most = {"memory": 0, "disk": 0, "bucket": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._weigh, daemon=True)
        self._thread.start()

    def _weigh(self) -> None:
        while not self._ended.wait(1.0):
            for name, now in self._places.taken().items():
                self.most[name] = max(self.most[name], now)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Member:
    """One server, started again and again; without a stack, plain vLLM."""

    ways_to_go = (
        "all killed",
        "worker killed",
        "engine killed",
        "server killed",
        "SIGTERM at rest",
        "SIGTERM under load",
    )

    def __init__(self, name: str, model: Path, folder: Path, stack: Path | None) -> None:
        self.name = name
        self.model = str(model)
        self.stack = stack
        self.log = folder / f"{name}.log"
        self.life = 0
        self.up = False
        self.requests = 0
        self.seconds_max = 0.0
        self._server: Server | None = None
        self._family: dict[int, str] = {}

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def alive(self) -> bool:
        return self.server.process.poll() is None and all(
            _running(pid) for pid, role in self._family.items() if role == "engine"
        )

    def start(self) -> None:
        self._server = Server.start(
            self.model, self.stack, _FLAGS, log=self.log, environment=ENVIRONMENT
        )
        self._family = processes(self.server.process.pid)
        self.life += 1
        self.requests = 0
        self.up = True

    def pids(self, role: str) -> list[int]:
        self._family = processes(self.server.process.pid)
        return [pid for pid, each in self._family.items() if each == role]

    def end(self, how: str) -> list[str]:
        """Let it end; answers with what was not as it should be."""
        self.up = False
        family = processes(self.server.process.pid)
        strange = []
        process = self.server.process
        if how == "SIGTERM at rest":
            self._wait_for_requests()
            process.terminate()
            if _wait(process) != 0:
                strange.append(f"{self.name}: exit code {process.poll()} after {how}")
        elif how == "SIGTERM under load":
            process.terminate()
            if _wait(process, _HANGS_S) is None:  # vLLM's server may, when its engine took long
                process.kill()
        elif how in ("worker killed", "engine killed", "server killed"):
            role = how.split()[0]
            for pid in [pid for pid, each in family.items() if each == role]:
                os.kill(pid, signal.SIGKILL)
            if _wait(process) is None:
                strange.append(f"{self.name}: the server outlives its engine")
        else:
            self.server.kill()
        end = time.monotonic() + _END_S
        while any(map(_running, family)) and time.monotonic() < end:
            time.sleep(0.05)
        strange += [
            f"{self.name}: its {role} ({pid}) is still there after: {how}"
            for pid, role in family.items()
            if _running(pid)
        ]
        self.server.kill()
        return strange

    def _wait_for_requests(self) -> None:
        """Let the requests end that are under way."""
        end = time.monotonic() + _END_S
        with contextlib.suppress(OSError, HTTPException):
            while self.server.metric("vllm:num_requests_running") and time.monotonic() < end:
                time.sleep(0.2)


def _wait(process: subprocess.Popen[bytes], seconds: float = _END_S) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"


def processes(root: int) -> dict[int, str]:
    """The process and all below it, by what they do."""
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found[pid] = _role(command, pid == root)
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
    return found


def _role(command: bytes, first: bool) -> str:
    if first:
        return "supervisor"
    roles = {b"EngineCore": "engine", b"VLLM::Worker": "worker", SERVER.encode(): "server"}
    for name, role in roles.items():
        if name in command:
            return role
    return "mover" if b"kvtier.move" in command else "other"


def build_model() -> Path:
    """The small model, kept in the environment."""
    return tiny_model.build(Path(sys.prefix) / "models" / "llama-0")
