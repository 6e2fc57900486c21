"""What makes one engine's KV bytes interchangeable with another's: the facts of its namespace."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kvtier.errors import ConfigError
from kvtier.types import Namespace

logger = logging.getLogger(__name__)

_SAMPLE = 1024
_HEADER_MAX = 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_ADAPTER = (*_WEIGHTS, "adapter_config.json")
_STABLE_HASHES = ("sha256", "sha256_cbor")


def namespace_of(
    vllm_config: Any, group_bytes: tuple[int, ...], blocks_per_chunk: int
) -> Namespace:
    """The namespace of an engine, from its configuration and its weights."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    facts = {
        "model": str(model.model),
        "model_config": _digest(model.hf_config.to_json_string(use_diff=False)),
        "weights": fingerprint_weights(vllm_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "state_dtype": f"{cache.mamba_cache_dtype},{cache.mamba_ssm_cache_dtype}",
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "block_tokens": str(cache.block_size),
        "chunk_blocks": str(blocks_per_chunk),
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "default"),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "context_parallel": f"{parallel.prefill_context_parallel_size},"
        f"{parallel.decode_context_parallel_size}",
        "speculative": _speculative(vllm_config),
        "attention": _attention(vllm_config.attention_config),
        "platform": _platform(),
        "engine": f"vllm {vllm.__version__}",
    }
    return Namespace(facts=facts, group_bytes=group_bytes, parts=parallel.world_size)


def _digest(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:32]


def _speculative(vllm_config: Any) -> str:
    config = vllm_config.speculative_config
    return "none" if config is None else f"{config.method} {config.model}"


def _attention(config: Any) -> str:
    """Which backend writes the blocks, where the user chose one; vLLM's own choice follows from
    the other facts."""
    chosen = {"all": config.backend, **config.backend_per_kind}
    names = [f"{kind}={backend.name}" for kind, backend in sorted(chosen.items()) if backend]
    return " ".join([*names, f"index={config.indexer_kv_dtype}"])


def _platform() -> str:
    """On the CPU the order of bytes within a block follows the instruction set."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return str(current_platform.get_device_name())


def check_hash(algorithm: str, *, persistent: bool) -> str | None:
    """A warning about the hash algorithm; raises ConfigError where it cannot work at all."""
    stable = algorithm in _STABLE_HASHES or "PYTHONHASHSEED" in os.environ
    if persistent and not stable:
        raise ConfigError(
            "--prefix-caching-hash-algo",
            f"{algorithm} gives other keys in every process, so nothing kept would be found again",
            "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED, or give every "
            "tier persistence: discard",
        )
    if persistent and algorithm == "sha256":
        return (
            "--prefix-caching-hash-algo sha256 hashes pickles, which may differ for equal "
            "content: use sha256_cbor to find all that is kept"
        )
    return None


# -- weights ---------------------------------------------------------------------------------


def fingerprint_weights(vllm_config: Any) -> str:
    """A cheap fingerprint of the weights: other bytes under the same path give another one."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return f"dummy {model.seed}"
    folder = _folder(model)
    if folder is None:
        return f"unread {model.model} {model.revision}"
    return fingerprint_folder(folder)


def _folder(model: Any) -> Path | None:
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def fingerprint_folder(folder: Path, patterns: Sequence[str] = _WEIGHTS) -> str:
    """Every file of weights by name, size, header, and a piece of each tensor in it."""
    digest = hashlib.sha256()
    for path, size in _files(folder, patterns):
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in _pieces(file, size, path.suffix == ".safetensors"):
                digest.update(piece)
    return digest.hexdigest()[:32]


def _files(folder: Path, patterns: Sequence[str]) -> list[tuple[Path, int]]:
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return [(path, path.stat().st_size) for path in found]


def adapter_files(folder: Path) -> list[tuple[Path, int]]:
    """The files of a LoRA adapter that are to be seen here, with their sizes."""
    return _files(folder, _ADAPTER)


def fingerprint_adapter(folder: Path) -> bytes:
    """What stands in the keys for an adapter's files."""
    return fingerprint_folder(folder, _ADAPTER).encode()


class Adapters:
    """What stands in the keys for the bytes of LoRA adapters, which vLLM's hashes leave out.

    Each is read once, because requests wait for the answer. When files have changed since, nobody
    knows which of them the engine has loaded: every request then has keys of its own. An adapter
    whose files are not to be seen is known in this process only.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, bytes]] = {}
        self._unseen = os.urandom(16)

    def salt(self, folder: Path) -> bytes:
        """The salt for a request with this adapter."""
        stamp = [(path, size, path.stat().st_mtime_ns) for path, size in adapter_files(folder)]
        if not stamp:
            return self._unseen
        if folder not in self._known:
            self._known[folder] = (stamp, fingerprint_adapter(folder))
        known, salt = self._known[folder]
        if known == stamp:
            return salt
        logger.warning("the adapter in %s has changed: nothing is kept for it any more", folder)
        return os.urandom(16)


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
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
