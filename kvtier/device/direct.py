"""Reads records from files straight into device memory, verifies and places them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import secrets
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from kvtier.device.copier import ERRORS, Accelerator, QueuedSteps
from kvtier.device.cuda.runtime import runtime
from kvtier.device.layout import DeviceLayout, describe
from kvtier.device.queue import CopyBatch, JobQueue, Work
from kvtier.errors import MediumError
from kvtier.record.record import (
    ALIGN,
    HEADER_BYTES,
    Buffer,
    padded,
    part_sum,
    stated_sum,
    verify_header,
)
from kvtier.settings import Gds
from kvtier.system.calls import Attempt
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, FilePlace, Outcome

if TYPE_CHECKING:
    from kvtier.device.cuda.staging_buffers import DeviceSums

logger = logging.getLogger(__name__)


class DirectFuture(Protocol):
    """A read under way."""

    def done(self) -> bool:
        """Whether `get` would answer at once."""

    def get(self) -> int:
        """Bytes read; raises one of `ERRORS`."""


class DirectFile(Protocol):
    """A file opened for direct reads."""

    def pread(self, buf: object, size: int, file_offset: int) -> DirectFuture:
        """Begin a read into device memory."""

    def close(self) -> None:
        """Close it; no read may be under way."""


class DirectStage(Protocol):
    """A buffer on the device."""

    buffer: object
    address: int

    def checksum(self, skip: int, size: int) -> int:
        """That of its bytes after the first `skip`; raises one of `ERRORS`."""


class DirectDriver(Protocol):
    """What opens files and makes staging buffers."""

    def open(self, path: Path) -> DirectFile:
        """Open a file; raises one of `ERRORS`."""

    def stages(self, count: int, size: int) -> Sequence[DirectStage]:
        """Make staging buffers, at most so many; raises RuntimeError where there is no room."""

    def release(self) -> None:
        """Take back what the driver was told of them; no read may be under way."""


class DirectRead(msgspec.Struct, eq=False):
    """A record in a file, and the read of it once that has begun."""

    place: FilePlace
    key: BlockKey
    group: int
    outcome: Outcome | None = None
    """How it ended; None until then."""
    stage: DirectStage | None = None
    """The buffer that it goes to, which holds this rank's part if it ended well."""
    record: int = 0
    """Where the whole record would begin on the device, if all of it lay there."""
    file: DirectFile | None = None
    future: DirectFuture | None = None
    size: int = 0

    def failed(self, error: Exception) -> Outcome:
        """What it is after an error, which the log says."""
        logger.warning("cannot read %s directly: %s", self.place.path, error)
        return Outcome.IO_ERROR


_hanging: list[DirectRead] = []

_STAGING_BYTES = 256 << 20
"""The most device memory that buffers take of what the model left."""


class DirectLoader:
    """Reads records through staging buffers. For one thread, which may block."""

    def __init__(
        self,
        layout: DeviceLayout,
        driver: DirectDriver,
        namespace: bytes,
        *,
        stages: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._layout = layout
        self._driver = driver
        self._namespace = namespace
        self._disk = Disk()
        self._clock = clock
        self._sleep = sleep
        self._stopped = False
        size = padded(max(layout.part_bytes)) + ALIGN
        count = stages or max(2, min(16, _STAGING_BYTES // size))
        self._free = list(driver.stages(count, size))
        self._lost: list[DirectRead] = []

    @property
    def free(self) -> int:
        """How many reads can be begun now."""
        self._reap()
        return len(self._free)

    def _reap(self) -> None:
        """Take back the buffers of reads that were given up and have ended since."""
        with Attempt("a direct read cannot tell whether it has ended"):
            for read in [
                each for each in self._lost if each.future is not None and each.future.done()
            ]:
                self._lost.remove(read)
                self._end_of(read)
                self.give_back(read)

    def begin(self, read: DirectRead) -> None:
        """Begin a read; only while there are `free` buffers."""
        header = self._header(read)
        if isinstance(header, Outcome):
            read.outcome = header
            return
        start, stop = self._span(read.group)
        try:
            read.file = self._driver.open(Path(read.place.path))
        except ERRORS as error:
            read.outcome = read.failed(error)
            return
        read.stage, read.size = self._free.pop(), stop - start
        read.record = read.stage.address - start
        try:
            read.future = read.file.pread(read.stage.buffer, read.size, read.place.at + start)
        except ERRORS as error:
            self.give_back(read)
            read.file.close()
            read.outcome = read.failed(error)

    def end(self, read: DirectRead, deadline: float) -> Outcome:
        """Wait for a read; one that is OK keeps its buffer until it is given back."""
        if read.future is None or read.outcome is not None:
            return read.outcome or Outcome.IO_ERROR
        self._lost.append(read)  # until it is seen to have ended, whatever happens meanwhile
        while not read.future.done():
            late = self._clock() >= deadline
            if late or self._stopped:
                read.outcome = Outcome.TIMEOUT if late else Outcome.CANCELLED
                return read.outcome
            self._sleep(0.0002)
        self._lost.remove(read)
        read.outcome = self._end_of(read)
        if read.outcome.ok:
            read.outcome = self._verify(read)
        if not read.outcome.ok:
            self.give_back(read)
        return read.outcome

    def give_back(self, read: DirectRead) -> None:
        """Nothing is copied to or from its buffer any more, which may be used again."""
        if read.stage is not None:
            self._free.append(read.stage)
            read.stage = None

    def stop(self) -> None:
        """Wait for no read any longer; from any thread."""
        self._stopped = True

    def close(self) -> None:
        """Release the buffers, but for those of reads that hang: they stay until the end."""
        self._reap()
        if not self._lost:
            self._driver.release()
        _hanging.extend(self._lost)
        self._lost.clear()
        self._free.clear()

    def _end_of(self, read: DirectRead) -> Outcome:
        """Wait for a read, and close its file."""
        assert read.future is not None
        assert read.file is not None
        try:
            count = read.future.get()
        except ERRORS as error:
            return read.failed(error)
        finally:
            read.file.close()
        return Outcome.OK if count == read.size else Outcome.IO_ERROR

    def _verify(self, read: DirectRead) -> Outcome:
        """Header, checksum and payload must agree; a slot that changed meanwhile is just gone."""
        assert read.stage is not None
        header = self._header(read)
        if isinstance(header, Outcome):
            return Outcome.GONE
        layout = self._layout
        size = layout.part_bytes[read.group]
        skip = layout.part_at(read.group) - self._span(read.group)[0]
        try:
            found = read.stage.checksum(skip, size)
        except ERRORS as error:
            return read.failed(error)
        return Outcome.OK if found == stated_sum(header, layout.part) else Outcome.CORRUPT

    def _header(self, read: DirectRead) -> Buffer | Outcome:
        """A record's header page, verified to be this key's."""
        page, layout = memoryview(bytearray(HEADER_BYTES)), self._layout
        try:
            fd = self._disk.open(Path(read.place.path))
            try:
                count = self._disk.readv(fd, [page], read.place.at)
            finally:
                self._disk.close(fd)
        except FileNotFoundError:
            return Outcome.GONE
        except OSError as error:
            return read.failed(error)
        if count != HEADER_BYTES:
            return Outcome.GONE
        size = layout.group_bytes[read.group]
        outcome = verify_header(page, read.key, self._namespace, size, layout.parts)
        return page if outcome.ok else outcome

    def _span(self, group: int) -> tuple[int, int]:
        """The aligned bytes of a record in which this rank's part lies."""
        start = self._layout.part_at(group)
        return start // ALIGN * ALIGN, padded(start + self._layout.part_bytes[group])


_STRIKES = 3
"""Loads that fail in a row, none of them for a record's sake, before others go another way. One
that is late, or meets a bad disk, has many reads under way, which all fail."""


class DirectPath:
    """Reads what the loads of a job queue have in files. `run` is for a thread of its own.

    The thread has as many reads under way as there are buffers. The copies from a buffer to the
    pages take no time beside the read, so it waits for them itself.
    """

    def __init__(
        self,
        device: Accelerator,
        job_queue: JobQueue,
        open_loader: Callable[[], DirectLoader | None],
    ) -> None:
        self.able = False
        """Whether it pays to name files in jobs now; those that do are tried in any case."""
        self.opening = True
        """Whether it is not known yet, which may take long."""
        self._stream = device.stream(urgent=True)
        self._job_queue = job_queue
        self._open = open_loader
        self._loader: DirectLoader | None = None
        self._failures = 0
        self._failed: Work | None = None
        """The last load that did."""
        self._stopped = False

    def stop(self) -> None:
        """Wait for no read any longer."""
        self._stopped = True
        if self._loader is not None:
            self._loader.stop()

    def run(self) -> None:
        """Serve until the job queue closes."""
        with Attempt("files are not read straight into the device"):
            self._loader = self._open()
        self.able = self._loader is not None
        self.opening = False
        if self._stopped:
            self.stop()
        under_way: deque[tuple[CopyBatch, DirectRead]] = deque()
        while self._refill(under_way):
            batch, read = under_way.popleft()
            with self._job_queue.moving(batch):
                self._finish(batch, read)
        if self._loader is not None:
            self._loader.close()

    def _refill(self, under_way: deque[tuple[CopyBatch, DirectRead]]) -> bool:
        """Begin reads while there are buffers; False at the end."""
        loader = self._loader
        while loader is None or loader.free or not under_way:
            batch = self._job_queue.next(self._job_queue.read, wait=not under_way)
            if batch is None:
                break
            if loader is None or not loader.free:
                # No read can end any more, or none could ever begin.
                self._judge(batch.work, Outcome.IO_ERROR)
                self._job_queue.finish(batch, [Outcome.DROPPED])
                continue
            job, (row,) = batch.work.job, batch.rows
            with self._job_queue.moving(batch):
                read = DirectRead(job.files[row], job.keys[row], batch.group)
                loader.begin(read)
                under_way.append((batch, read))
        return bool(under_way)

    def _finish(self, batch: CopyBatch, read: DirectRead) -> None:
        assert self._loader is not None
        outcome = self._loader.end(read, batch.work.job.deadline)
        if outcome.ok:
            outcome = self._place(batch, read)
            self._loader.give_back(read)
        self._judge(batch.work, outcome)
        self._job_queue.finish(batch, [outcome])

    def _place(self, batch: CopyBatch, read: DirectRead) -> Outcome:
        """Copy a verified record from its buffer to its pages."""

        def copy() -> object:
            layout = self._job_queue.layout
            part = np.array([read.record + layout.part_at(batch.group)], np.int64)
            copies = describe(layout, batch.group, batch.ids, part)
            return self._stream.to_device(copies)

        steps = (lambda: self._job_queue.reach(batch), copy)
        done = QueuedSteps(batch.work.what, self._stream, *steps).done()
        return Outcome.OK if done else Outcome.IO_ERROR

    def _judge(self, load: Work, outcome: Outcome) -> None:
        """Go another way once direct reads fail for no fault of their records."""
        if outcome in (Outcome.IO_ERROR, Outcome.TIMEOUT):
            self._failures += load is not self._failed
            self._failed = load
        elif outcome.ok:
            self._failures, self._failed = 0, None
        if self.able and self._failures >= _STRIKES:
            self.able = False
            logger.warning(
                "direct reads failed in %d loads in a row: loads go through pinned memory until "
                "the engine is started again",
                self._failures,
            )


# -- the driver for GPUDirect Storage, and whether this machine has it -----------------------------


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
    module = [sys.executable, "-P", "-m", "kvtier.device.direct"]
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
