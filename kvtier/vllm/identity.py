"""What makes one engine's KV bytes interchangeable with another's: the facts of its namespace."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from kvtier.core.record import VERSION as RECORD_VERSION
from kvtier.errors import ConfigError

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
_MODEL = (*_WEIGHTS, "*processor_config.json")
_ADAPTER = (*_WEIGHTS, "adapter_config.json")
_ATTENTION_LIBRARIES = ("flashinfer-python", "flashinfer-cubin", "flash-attn", "amd-aiter")
"""vLLM's choice of a backend follows from which of these are there, and with it the order of bytes
within a block that is larger than those of the backend."""
_STABLE_HASHES = ("sha256", "sha256_cbor")
_BY_LENGTH = ("longrope", "llama4")
"""What stands in the configuration of models that vLLM computes in another way if they are served
with long prompts: even the short ones."""
_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""How images and the like become embeddings: vLLM hashes what was given, not what became of it."""


def facts_of(vllm_config: Any, blocks_per_chunk: int, weights: str | None = None) -> dict[str, str]:
    """The facts of an engine's namespace, from its configuration and its weights; `weights` is what
    its user calls them, in place of a fingerprint."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    configured = configuration_of(model.hf_config)
    by_length = any(word in configured for word in _BY_LENGTH)
    return {
        "model": whole_name(str(model.model)),
        "model_config": _digest(configured),
        "implementation": _stated(model, "model_impl", "model_class_overrides"),
        "longest_prompt": str(model.max_model_len) if by_length else "any",
        "media": _media(model.multimodal_config),
        "adapters": _adapters(vllm_config.lora_config, model.dtype),
        "weights": f"called {weights}" if weights else fingerprint_weights(vllm_config),
        "dtype": str(model.dtype),
        "quantization": _stated(model, "quantization", "quantization_config"),
        "kv_dtype": _stated(cache, "cache_dtype", "kv_cache_dtype_skip_layers"),
        "state": _stated(
            cache,
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
            "use_replayssm",
            "replayssm_buffer_len",
            "use_kda_recoverssm",
        ),
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "block_tokens": str(cache.block_size),
        "chunk_blocks": str(blocks_per_chunk),
        "record": str(RECORD_VERSION),
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "default"),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "context_parallel": _stated(
            parallel,
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "cp_kv_cache_interleave_size",
            "dcp_kv_cache_interleave_size",
        ),
        "speculative": _speculative(vllm_config, weights),
        "attention": _attention(vllm_config.attention_config),
        "platform": _platform(),
        "engine": f"vllm {vllm.__version__}",
    }


def whole_name(model: str) -> str:
    """What a model is called: `./model` is another one wherever it is said, and so its whole path
    is meant. Links are kept: one that leads to other weights later on has a name that lasts."""
    path = Path(model)
    return str(path.absolute()) if path.exists() else model


def configuration_of(hf_config: Any) -> str:
    """A model's configuration; the name by which it was read stands in it, too."""
    text = str(hf_config.to_json_string(use_diff=False))
    named = json.loads(text)
    name = named.get("_name_or_path")
    if not isinstance(name, str) or whole_name(name) == name:
        return text
    named["_name_or_path"] = whole_name(name)
    return json.dumps(named, indent=2, sort_keys=True) + "\n"  # as it is written otherwise


def _digest(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:32]


def _stated(config: Any, *names: str) -> str:
    """These settings, as far as this version of vLLM has them."""
    return ",".join(str(getattr(config, name, None)) for name in names)


def _media(config: Any) -> str:
    if config is None:
        return "none"
    settings = {name: getattr(config, name, None) for name in _MEDIA}
    return json.dumps(settings, sort_keys=True, default=str)


def _adapters(config: Any, dtype: object) -> str:
    """How much of LoRA adapters is applied; keys name each by its files."""
    if config is None:
        return "whole"
    said = []
    if config.target_modules is not None:
        said.append(f"only {sorted(config.target_modules)}")
    if config.lora_dtype not in ("auto", dtype):
        said.append(f"as {config.lora_dtype}")
    if config.enable_tower_connector_lora:
        said.append("to images, too")
    return ", ".join(said) or "whole"


def _speculative(vllm_config: Any, weights: str | None) -> str:
    """Which model guesses ahead, and its weights: its blocks are kept beside the other's."""
    config = vllm_config.speculative_config
    if config is None:
        return "none"
    said = f"{config.method} {whole_name(str(config.model))}"
    draft, target = config.draft_model_config, vllm_config.model_config
    if draft is None or draft.model == target.model or weights:
        return said
    load = getattr(config, "draft_load_config", None) or vllm_config.load_config
    return f"{said} {_weights_of(draft, load)}"


def _attention(config: Any) -> str:
    """Which backend writes the blocks, where the user chose one; vLLM's own choice follows from
    the other facts, and from the libraries that it finds."""
    chosen = {"all": config.backend, **config.backend_per_kind}
    names = [f"{kind}={backend.name}" for kind, backend in sorted(chosen.items()) if backend]
    found = [f"{name}={version}" for name, version in _versions(_ATTENTION_LIBRARIES)]
    return " ".join([*names, f"index={config.indexer_kv_dtype}", *found])


def _versions(distributions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of these that are installed."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


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
    return _weights_of(vllm_config.model_config, vllm_config.load_config)


def _weights_of(model: Any, load: Any) -> str:
    if str(load.load_format) == "dummy":
        return f"dummy {model.seed}"
    in_files = str(load.load_format) in _FROM_FILES
    folder = _folder(model, load) if in_files else None
    if folder is not None and _files(folder, _WEIGHTS):
        return fingerprint_folder(folder, _MODEL) + _chosen(load)
    if in_files and Path(model.model).is_file():
        return _fingerprint([(Path(model.model), Path(model.model).stat().st_size)])
    logger.warning(
        "the weights of %s are not in files that could be read here, so that what is kept is for "
        'this run only: give them a name in kv_connector_extra_config, "weights": "...", and '
        "another one when they change",
        model.model,
    )
    return f"unseen {os.urandom(16).hex()}"


def _chosen(load: Any) -> str:
    """Which of a folder's files are read, where that is said: several models may share it."""
    extra = getattr(load, "model_loader_extra_config", None)
    pattern = extra.get("pattern") if isinstance(extra, Mapping) else None
    return "" if pattern is None else f" {pattern}"


def _folder(model: Any, load: Any) -> Path | None:
    folder = Path(model.model)
    if folder.is_dir():
        return folder
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
    return [(path, path.stat().st_size) for path in found]


def adapter_files(folder: Path) -> list[tuple[Path, int]]:
    """The files of a LoRA adapter that are to be seen here, with their sizes."""
    return _files(folder, _ADAPTER)


def fingerprint_adapter(folder: Path) -> bytes:
    """What stands in the keys for an adapter's files."""
    return fingerprint_folder(folder, _ADAPTER).encode()


class Adapters:
    """What stands in the keys for the bytes of LoRA adapters, which vLLM's hashes leave out.

    Each is read once, because requests wait for the answer. When files have changed since, or
    cannot be read, nobody knows which of them the engine has loaded: nothing is kept from then on.
    An adapter whose files are not to be seen is known in this process only.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, bytes | None]] = {}
        self._unseen = os.urandom(16)

    def salt(self, folder: Path) -> bytes | None:
        """The salt for a request with this adapter; None if nothing is to be kept of it."""
        if folder in self._known and self._known[folder][1] is None:
            return None
        try:
            stamp = [(path, size, path.stat().st_mtime_ns) for path, size in adapter_files(folder)]
            if folder not in self._known:
                salt = fingerprint_adapter(folder) if stamp else self._unseen
                self._known[folder] = (stamp, salt)
            changed = stamp != self._known[folder][0]
        except OSError:
            changed = True
        if changed:
            logger.warning(
                "the adapter in %s has changed, or cannot be read: nothing is kept for it until "
                "the engine is started again",
                folder,
            )
            self._known[folder] = (None, None)
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
