"""GPUDirect Storage: whether it is used, and kvikio as the driver of `DirectLoader`."""

from __future__ import annotations

import enum
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.core.record import Buffer
from kvtier.device.direct import DirectFile
from kvtier.errors import MediumError

logger = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
"""Importing torch and starting a CUDA context take most of it."""


class Gds(enum.Enum):
    """Whether files are read straight into GPU memory."""

    AUTO = "auto"
    REQUIRE = "require"
    OFF = "off"


def probe(
    folder: Path, seconds: float = PROBE_SECONDS, command: Sequence[str] | None = None
) -> str | None:
    """Why a folder's files cannot be read straight into GPU memory; None if it was done.

    Tried by a process of its own, which is killed after `seconds`.
    """
    command = command or [sys.executable, "-m", "kvtier.device.gds_probe", str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the attempt did not end within {seconds:g} s"
    except OSError as error:
        return f"the attempt could not be started ({error.strerror})"
    try:
        reason = json.loads(done.stdout.splitlines()[-1])["reason"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the attempt died with status {done.returncode} ({last or 'without a word'})"
    return None if reason is None else str(reason)


def decide(mode: Gds, folder: Path, attempt: Callable[[Path], str | None] = probe) -> bool:
    """Whether to read directly; raises MediumError if it is required and does not work."""
    if mode is Gds.OFF:
        return False
    reason = attempt(folder)
    if reason is None:
        return True
    if mode is Gds.REQUIRE:
        raise MediumError(
            f"GPUDirect Storage is required for {folder}, but {reason}: mend that, or set "
            "gds: auto to go through pinned memory"
        )
    logger.info("%s goes through pinned memory, not GPUDirect Storage: %s", folder, reason)
    return False


class KvikioDriver:
    """kvikio and torch. Construct it only after `probe` has found nothing against it."""

    def __init__(self, index: int) -> None:
        import kvikio
        import kvikio.buffer
        import kvikio.defaults
        import torch

        # Fail rather than go through host memory unasked.
        kvikio.defaults.set("compat_mode", type(kvikio.defaults.get("compat_mode")).OFF)
        self._kvikio: Any = kvikio
        self._torch: Any = torch
        self._device = f"cuda:{index}"
        self._stream = torch.cuda.Stream(index)

    def open(self, path: Path) -> DirectFile:
        file: DirectFile = self._kvikio.CuFile(path, "r")
        return file

    def stage(self, size: int) -> KvikioStage:
        """A buffer on the device, registered for direct reads."""
        tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        self._kvikio.buffer.memory_register(tensor)
        return KvikioStage(self._torch, self._stream, tensor)


class KvikioStage:
    """A buffer on the device, and pinned memory in which its bytes are proved."""

    def __init__(self, torch: Any, stream: Any, tensor: Any) -> None:
        self._torch = torch
        self._stream = stream
        self._pinned = torch.empty(tensor.numel(), dtype=torch.uint8).pin_memory()
        self.buffer = tensor
        self.address: int = tensor.data_ptr()

    def to_host(self, size: int) -> Buffer:
        with self._torch.cuda.stream(self._stream):
            self._pinned[:size].copy_(self.buffer[:size], non_blocking=True)
            self._stream.synchronize()
        array: np.ndarray[Any, np.dtype[np.uint8]] = self._pinned.numpy()
        return array.data[:size]
