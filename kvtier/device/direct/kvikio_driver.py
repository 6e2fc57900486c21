"""The driver for GPUDirect Storage, and whether this machine has it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.device.cuda.runtime import runtime
from kvtier.device.direct.loader import DirectDriver, DirectFile, DirectLoader, DirectStage
from kvtier.device.layout import DeviceLayout
from kvtier.errors import MediumError
from kvtier.record.record import part_sum
from kvtier.settings import Gds

if TYPE_CHECKING:
    from kvtier.device.cuda.staging_buffers import DeviceSums


logger = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
"""Importing torch and starting a CUDA context take most of it."""
_DEATH_SECONDS = 5.0

_SHARE = 8
"""Buffers take at most this part of the device's memory that is free."""
_THREADS = 8
_TASK_BYTES = 1 << 62
"""A read is one piece, for one thread: of several, kvikio before 26.10 says that they have failed
when one has, and goes on writing the others to a buffer that is somebody else's by then."""


def probe(
    folder: Path,
    seconds: float = PROBE_SECONDS,
    command: Sequence[str] | None = None,
    device: int = 0,
) -> str | None:
    """Why a folder's files cannot be read straight into GPU memory; None if it was done.

    Tried by a process of its own, which is killed after `seconds`, with a file that is removed
    whatever becomes of it; beside the folder if that is still to be made.
    """
    folder = folder if folder.is_dir() else folder.parent
    file = folder / f".kvtier-gds-{secrets.token_hex(8)}"
    # -P: modules are looked for where they are installed, not in whatever folder this is.
    module = [sys.executable, "-P", "-m", "kvtier.device.direct.kvikio_driver"]
    command = [*(command or module), str(file), str(device)]
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    except OSError as error:
        return f"the attempt could not be started ({error.strerror})"
    try:
        said, complaint = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"the attempt did not end within {seconds:g} s"
    finally:
        _end(child)
        with contextlib.suppress(OSError):
            file.unlink()
    try:
        reason = json.loads(said.splitlines()[-1])["reason"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the attempt died with status {child.returncode} ({last or 'without a word'})"
    return None if reason is None else str(reason)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, and do not wait for one that a driver keeps in the kernel."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_DEATH_SECONDS)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


class DirectAccess:
    """How one rank reads the files of `folders` straight into its device, if at all.

    `attempt` says why a folder's files cannot be read so (None: they can); `driver` is what reads
    them then.
    """

    def __init__(
        self,
        mode: Gds,
        folders: Sequence[Path],
        attempt: Callable[[Path], str | None],
        driver: Callable[[], DirectDriver],
    ) -> None:
        self.mode = mode if folders else Gds.OFF
        self._folders = folders
        self._attempt = attempt
        self._driver = driver
        self._works: bool | None = None

    def works(self) -> bool:
        """Whether it does: tried once, which takes seconds. Raises MediumError if it must and
        does not."""
        if self._works is None:
            self._works = self.mode is not Gds.OFF and self._try()
        return self._works

    def _try(self) -> bool:
        for folder in self._folders:
            reason = self._attempt(folder)
            if reason is not None:
                self._refuse(folder, reason)
                return False
        logger.info("GPUDirect Storage: blocks go from disk straight into GPU memory")
        return True

    def _refuse(self, folder: Path, reason: str) -> None:
        if self.mode is Gds.REQUIRE:
            raise MediumError(
                f"GPUDirect Storage is required for {folder}, but {reason}: mend that, or set "
                "gds: auto to go through pinned memory"
            )
        logger.info("%s goes through pinned memory, not GPUDirect Storage: %s", folder, reason)

    def open(self, layout: DeviceLayout, namespace: bytes) -> DirectLoader | None:
        """A loader for the calling thread; None where blocks go through pinned memory."""
        if not self.works():
            return None
        try:
            return DirectLoader(layout, self._driver(), namespace)
        except (ImportError, OSError, RuntimeError) as error:
            self._works = False
            self._refuse(self._folders[0], f"the driver failed ({error})")
            return None


class KvikioDriver:
    """kvikio and torch. Construct it only after `probe` has found nothing against it.

    `by_host` lets kvikio go through host memory, where there is a device and nothing else of what
    direct reads need: all but the speed can be tried that way.
    """

    def __init__(self, index: int, *, by_host: bool = False) -> None:
        import kvikio
        import kvikio.buffer
        import kvikio.defaults
        import torch

        modes = type(kvikio.defaults.get("compat_mode"))
        kvikio.defaults.set(
            {
                # Fail rather than go through host memory unasked.
                "compat_mode": modes.ON if by_host else modes.OFF,
                "gds_threshold": 0,  # small reads, too
                "num_threads": _THREADS,
                "task_size": _TASK_BYTES,
            }
        )
        self._kvikio: Any = kvikio
        self._torch: Any = torch
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._registered: list[Any] = []

    def open(self, path: Path) -> DirectFile:
        file: DirectFile = self._kvikio.CuFile(path, "r")
        return file

    def stages(self, count: int, size: int) -> Sequence[DirectStage]:
        """Buffers in memory of their own: torch's allocator shares one piece among many tensors,
        and what is registered for direct reads is always the whole piece. Fewer than asked for,
        or RuntimeError, where that would leave the model little."""
        free, _ = self._torch.cuda.mem_get_info(self._device)
        count = min(count, free // _SHARE // size)
        if count < 2:
            raise RuntimeError(
                f"buffers for records of {size >> 20} MiB do not fit into the "
                f"{free >> 20} MiB that are free on the device"
            )
        with self._torch.cuda.device(self._device):
            memory = DeviceMemory(runtime(), count * size)
        whole = self._torch.as_tensor(memory, device=self._device)
        try:
            self._kvikio.buffer.memory_register(whole)
            self._registered.append(whole)
        except RuntimeError as error:
            logger.warning("direct reads go through the driver's own buffers: %s", error)
        sums = device_sums(self._torch, self._device, self._stream, size)
        return [
            KvikioStage(self._torch, self._stream, whole[at : at + size], sums)
            for at in range(0, count * size, size)
        ]

    def release(self) -> None:
        while self._registered:
            try:
                self._kvikio.buffer.memory_deregister(self._registered.pop())
            except RuntimeError as error:
                logger.warning("memory stays registered for direct reads: %s", error)


class DeviceMemory:
    """A piece of the current device's memory, for whoever knows the CUDA array interface."""

    def __init__(self, cudart: Any, size: int) -> None:
        pointer = ctypes.c_void_p()
        result = cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        if result:
            raise RuntimeError(f"cudaMalloc of {size} bytes: error {result}")
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "version": 3,
        }
        # Not at exit: the driver may be gone by then, and gives everything back itself.
        weakref.finalize(self, cudart.cudaFree, pointer).atexit = False


class KvikioStage:
    """A buffer on the device; its checksums are taken there, or else by the host of a copy."""

    def __init__(self, torch: Any, stream: Any, tensor: Any, sums: DeviceSums | None) -> None:
        self._torch = torch
        self._stream = stream
        self._sums = sums
        self._pinned: Any = None
        self.buffer = tensor
        self.address: int = tensor.data_ptr()

    def checksum(self, skip: int, size: int) -> int:
        if self._sums is not None and self._sums.can(skip, size):
            return self._sums.take(self.buffer, skip, size)
        if self._pinned is None:
            self._pinned = self._torch.empty(
                self.buffer.numel(), dtype=self._torch.uint8, pin_memory=True
            )
        with self._torch.cuda.stream(self._stream):
            self._pinned[:size].copy_(self.buffer[skip : skip + size], non_blocking=True)
            self._stream.synchronize()
        array: np.ndarray[Any, np.dtype[np.uint8]] = self._pinned.numpy()
        return part_sum(array.data[:size])


def device_sums(torch: Any, device: Any, stream: Any, longest: int) -> DeviceSums | None:
    """What takes checksums on the device, if it does so rightly."""
    try:
        from kvtier.device.cuda.staging_buffers import DeviceSums

        return DeviceSums(torch, device, stream, longest)
    except (ImportError, RuntimeError) as error:
        logger.info("direct reads are proved by the host: %s", error)
        return None


# Run as a process of its own: can this machine read files straight into GPU memory?
#
# Prints one line of JSON, `{"reason": null}` if it can. Opening the cuFile driver without a device
# hangs for good, which is why the steps are taken in this order, and somebody else holds the
# clock.

SIZE = 1 << 20


def reason_against(path: str, device: int = 0) -> str | None:
    """Why not; None if a real file was written from a device and came back unchanged. Whoever asks
    removes the file: this process may not live to do it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "there is no CUDA device"
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
        import torch
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'kvtier[gds]'"
    except (ImportError, OSError, RuntimeError) as error:  # the last without its libcufile.so
        return f"kvikio cannot be loaded ({error})"
    forbid_detours()
    try:
        available = kvikio.cufile_driver.get("is_gds_available")
    except RuntimeError:  # without the module its driver does not open now
        available = False
    if not available:
        return "the nvidia-fs kernel module or the cuFile library does not offer it"
    mode = kvikio.defaults.get("compat_mode")
    if mode.name == "ON":
        return "kvikio is told to copy through host memory (KVIKIO_COMPAT_MODE)"
    kvikio.defaults.set({"compat_mode": type(mode).OFF, "gds_threshold": 0})
    try:
        sent = torch.randint(0, 255, (SIZE,), dtype=torch.uint8, device=f"cuda:{device}")
        back = torch.zeros_like(sent)
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # its other lines are advice to who looks for a bug
        reason, _, _ = str(error).partition("\n")
        return f"a process of its own cannot use the device ({reason})"
    folder = Path(path).parent
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        return f"no file can be made in {folder} ({error.strerror})"
    try:
        with kvikio.CuFile(path, "r+") as file:
            moved = file.pwrite(sent, SIZE).get(), file.pread(back, SIZE).get()
    except (OSError, RuntimeError) as error:
        return f"the file system of {folder} refuses it ({error})"
    if moved != (SIZE, SIZE) or not bool((sent == back).all()):
        return f"a file in {folder} did not come back as it was written"
    return None


def forbid_detours() -> None:
    """Before its driver is opened: what cuFile cannot read directly, where the file system is of
    another kind, say, it reads through host memory if nothing else is said, and nobody learns."""
    allow_compat_mode = 1  # of CUFileBoolConfigParameter_t
    with contextlib.suppress(OSError, AttributeError):  # those before CUDA 12.9 cannot be told
        library = ctypes.CDLL("libcufile.so.0")
        library.cuFileSetParameterBool(allow_compat_mode, ctypes.c_bool(False))


if __name__ == "__main__":
    print(json.dumps({"reason": reason_against(sys.argv[1], int(sys.argv[2]))}), flush=True)
