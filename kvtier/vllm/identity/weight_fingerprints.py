"""Fingerprints of weights and adapters: other bytes under the same name are another model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from kvtier.system.calls import abandonable

logger = logging.getLogger(__name__)

_SAMPLE = 1024
_HEADER_MAX = 100 << 20
_PATIENCE_S = 0.5
"""So long an engine waits for the files of an adapter: once, whenever they cannot be read."""
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
_MODEL = (*_WEIGHTS, "*.index.json", "*processor_config.json")
_ADAPTER = (*_WEIGHTS, "adapter_config.json")


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
        'this run only: give them a name in kv_connector_extra_config, "weights": "...", and '
        "another one when they change",
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
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true":
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


class Adapters:
    """What stands in the keys for the bytes of LoRA adapters, which vLLM's hashes leave out.

    Each is read once, because requests wait for the answer. When files have changed since, or
    cannot be read, nobody knows which of them the engine has loaded: nothing is kept from then on,
    nor of what was being stored. An adapter whose files are not to be seen is known in this process
    only, until the engine reads it again. Files are looked at in another thread: they may lie on a
    server that hangs, and the engine must not wait for that.

    Workers know adapters by numbers. One that is given to another adapter makes requests go on
    with that, if it is read in place of the first; else those that come get the first.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._known: dict[Path, tuple[object, bytes | None]] = {}
        self._unseen = os.urandom(16)
        self._patience_s = patience_s
        self._look: Future[bytes | None] | None = None
        """The last look at files, which may go on."""
        self._users: dict[str, Path] = {}
        self._storing: dict[int, Path] = {}
        self._numbers: dict[int, Path] = {}
        self._reads: Counter[int] = Counter()

    def read(self, adapter: Any) -> None:
        """The engine reads it now, whenever it is used."""
        self._reads[adapter.lora_int_id] += 1
        self._number(adapter)
        self.salt(Path(adapter.lora_path))

    def removed(self, number: int) -> None:
        """The engine has let go of it: its number is free, unless requests have it yet."""
        if self._numbers.get(number) not in self._users.values():
            self._numbers.pop(number, None)

    def began(self, request: str, adapter: Any) -> bytes | None:
        """The salt for a request with this adapter, which the engine may read later only."""
        folder = self._users[request] = Path(adapter.lora_path)
        self._number(adapter)
        salt = self.salt(folder)
        if salt != self._unseen:
            return salt
        number = adapter.lora_int_id
        which = f" {number} {self._reads[number]}".encode()
        return None if adapter.load_inplace else salt + which

    def _number(self, adapter: Any) -> None:
        number, folder = adapter.lora_int_id, Path(adapter.lora_path)
        before = self._numbers.get(number, folder)
        self._numbers[number] = folder
        if before != folder:
            for doubtful in [before] if adapter.load_inplace else [before, folder]:
                self._give_up(doubtful, f"shares its number, {number}, with that in {folder}")

    def _give_up(self, folder: Path, why: str) -> None:
        if self._known.get(folder, (None, b""))[1] is None:
            return  # and said so
        logger.warning(
            "the adapter in %s %s: nothing is kept for it until the engine is started again",
            folder,
            why,
        )
        self._known[folder] = (None, None)

    def ended(self, request: str) -> None:
        """It stores nothing any more."""
        self._users.pop(request, None)

    def stores(self, request: str, errand: int) -> None:
        """Blocks of a request are about to be stored."""
        if request in self._users:
            self._storing[errand] = self._users[request]

    def vouches(self, errands: Iterable[int]) -> bool:
        """Whether what was stored was computed by the adapters in its keys: if one has changed
        between a request's coming and now, the engine may have read it in between."""
        folders = {self._storing.pop(errand) for errand in errands if errand in self._storing}
        salts = [self.salt(folder) for folder in folders]
        return None not in salts

    def salt(self, folder: Path) -> bytes | None:
        """What stands in the keys for this adapter; None if nothing is to be kept of it."""
        if self._look is not None and not self._look.done():
            return None
        self._look = abandonable(partial(self._salt, folder), "kvtier-adapter")
        try:
            return self._look.result(self._patience_s)
        except TimeoutError:
            logger.warning(
                "the files of the adapter in %s take long to be looked at: nothing is kept of "
                "requests with adapters that come meanwhile",
                folder,
            )
            return None

    def _salt(self, folder: Path) -> bytes | None:
        if folder in self._known and self._known[folder][1] is None:
            return None
        try:
            stamp = [(path, size, path.stat().st_mtime_ns) for path, size in adapter_files(folder)]
            if folder not in self._known:
                salt = fingerprint_adapter(folder) if stamp else self._unseen
                self._known.setdefault(folder, (stamp, salt))  # unless given up meanwhile
            changed = stamp != self._known[folder][0]
        except OSError:
            changed = True
        if changed:
            self._give_up(folder, "has changed, or cannot be read")
        return self._known[folder][1]


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
