"""Run as a process of its own: can this machine read files straight into GPU memory?

Prints one line of JSON, `{"reason": null}` if it can. Opening the cuFile driver without a device
hangs for good, which is why the steps are taken in this order, and somebody else holds the clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path

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
