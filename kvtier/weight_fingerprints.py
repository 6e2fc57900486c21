"""Names of models, and fingerprints of weights and adapters: other bytes under the same name are
another model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

_SAMPLE = 1024
_HEADER_MAX = 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_FROM_FILES = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "npcache",
    "mistral",
    "gguf",
    "bitsandbytes",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
)
"""Ways to load weights that read the files of the model's own folder. Others take them from where
their settings say, or from a server, and there may be a folder of that name all the same."""
_OTHERS = ("audio_model_id", "text_model_id")
"""Where the configuration of a model names others of which it takes a part (Ultravox)."""
_OTHER_HUB = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
_MODEL = (*_WEIGHTS, "*.index.json", "*processor_config.json")
_ADAPTER = (*_WEIGHTS, "adapter_config.json")
BY_LENGTH = ("longrope", "llama4")
"""What stands in the configuration of models that are computed in another way if they are served
with long prompts: even the short ones."""


def whole_name(model: str) -> str:
    """What a model is called: `./model` is another one wherever it is said, and so its whole path
    is meant. Links are kept: one that leads to other weights later on has a name that lasts."""
    path = Path(model)
    return str(path.absolute()) if path.exists() else model


def fingerprint_weights(vllm_config: Any) -> str:
    """A cheap fingerprint of an engine's weights, also of those that come from other models."""
    model, load = vllm_config.model_config, vllm_config.load_config
    configured = getattr(model, "hf_config", None)
    named = [getattr(configured, each, None) for each in _OTHERS]
    others = [SimpleNamespace(model=each, revision=None, seed=model.seed) for each in named if each]
    return " ".join(weights_of(each, load) for each in (model, *others))


def weights_of(model: Any, load: Any) -> str:
    """The same, of one model and how it is loaded."""
    if str(load.load_format) == "dummy":
        return f"dummy {model.seed}"
    in_files, reason = str(load.load_format) in _FROM_FILES, ""
    folder = folder_of(model, load) if in_files else None
    try:
        if folder is not None and _files(folder, _WEIGHTS):
            return fingerprint_folder(folder, _MODEL) + _chosen(load)
        if in_files and Path(model.model).is_file():
            return _fingerprint([(Path(model.model), Path(model.model).stat().st_size)])
    except OSError as error:  # not all need be weights that the engine reads
        reason = f" ({error})"
    logger.warning(
        "the weights of %s are not in files that could be read here%s, so that what is kept is for "
        'this run only: give them a name in the extra config, "weights": "...", and another one '
        "when they change",
        model.model,
        reason,
    )
    return f"unseen {os.urandom(16).hex()}"


def _chosen(load: Any) -> str:
    """Which of a folder's files are read, where that is said: several models may share it."""
    extra = getattr(load, "model_loader_extra_config", None)
    pattern = extra.get("pattern") if isinstance(extra, Mapping) else None
    said = [load.load_format if str(load.load_format) != "auto" else None, pattern]
    return "".join(f" {each}" for each in said if each is not None)


def folder_of(model: Any, load: Any) -> Path | None:
    """Where the files of a model are on this machine, if they are."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    if any(os.environ.get(each, "").lower() in ("true", "1") for each in _OTHER_HUB):
        return None  # what the other hub calls so may be there, too
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (ImportError, OSError, ValueError):  # not there, or no name of the hub's
        return None
    return Path(found)


def fingerprint_folder(folder: Path, patterns: Sequence[str] = _WEIGHTS) -> str:
    """Every file of weights by name, size, header, and a piece of each tensor in it."""
    return _fingerprint(_files(folder, patterns))


def _fingerprint(files: Sequence[tuple[Path, int]]) -> str:
    digest = hashlib.sha256()
    for path, size in files:
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in _pieces(file, size, path.suffix == ".safetensors"):
                digest.update(piece)
    return digest.hexdigest()[:32]


def _files(folder: Path, patterns: Sequence[str]) -> list[tuple[Path, int]]:
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return [(path, path.stat().st_size) for path in found if not path.is_dir()]


def adapter_files(folder: Path) -> list[tuple[Path, int]]:
    """The files of a LoRA adapter that are to be seen here, with their sizes."""
    return _files(folder, _ADAPTER)


def fingerprint_adapter(folder: Path) -> bytes:
    """What stands in the keys for an adapter's files."""
    return fingerprint_folder(folder, _ADAPTER).encode()


def _pieces(file: BinaryIO, size: int, safetensors: bool) -> Iterator[bytes]:
    places = _tensor_places(file, size) if safetensors else None
    if places is None:
        step = max(_SAMPLE, size // 1024)
        places = list(range(0, size, step))
    for place in [*places, max(0, size - _SAMPLE)]:
        file.seek(place)
        yield file.read(_SAMPLE)


def _tensor_places(file: BinaryIO, size: int) -> list[int] | None:
    """Where to read a piece of every tensor; None if the header is not as it should be."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size, _HEADER_MAX):
        return None
    try:
        header = json.loads(file.read(length))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        # The middle: first rows are often padding or special tokens.
        return [0, *sorted(8 + length + (int(a) + int(b)) // 2 for a, b in spans)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
