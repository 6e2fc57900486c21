"""Downloads the wheel of a vLLM, by way of the package index that pip is configured for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def download(version: str, folder: Path, names: tuple[str, ...] = ("vllm",)) -> Path:
    """The wheel of the first of these distributions that has this version, in this folder."""
    for name in names:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{name}=={version}"]
        last = name == names[-1]
        if subprocess.run(command, stderr=None if last else subprocess.DEVNULL).returncode == 0:
            [wheel] = folder.glob("vllm*.whl")
            return wheel
    sys.exit(f"no wheel of {' or '.join(names)} {version} can be had; pip's message is above")
