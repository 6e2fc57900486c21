"""`kvtier config migrate`: what vLLM's offloading or LMCache is told, as a stack.

docs/guides/migrate.md has the same in tables. What has no counterpart is said in comments, so that
the answer is a stack file as a whole. Keys of a store are left out: they belong in the environment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import typer

from kvtier.cli import console
from kvtier.config import load
from kvtier.errors import ConfigError
from kvtier.settings import ByteSize

_GIB = 1 << 30
_DISK, _BUCKET = "80%", "1TiB"
"""Capacities where the other cache has no bound."""
_LEAST = "64MiB"
_VLLM_BLOCK = 16
_VLLM_FLAGS = ("kv-offloading-size", "kv-offloading-backend", "kv-transfer-config")
_LMCACHE_FLAGS = ("l1-size-gb", "chunk-size", "eviction-policy", "gds-l1-path", "l2-adapter")
_SECRETS = {
    *("access_key", "secret_key", "session_token", "aws_access_key_id", "aws_secret_access_key"),
}
_FORM = "write kvtier migrate lmcache.yaml, or kvtier migrate --kv-offloading-size 64"

# What needs no setting in a stack; with the reason that the comment gives.
_NOTHING = {
    "spec_name": "list the tiers one after the other, as above",
    "kv_offload_backend": "the tiers above say it",
    "self_describing_kv_events": "events always state the content of blocks",
    "enable_kv_events": "events tell of all tiers",
    "locality": "events tell of all tiers",
    "backpressure": "what exceeds queue_blocks is dropped, and counted",
    "lazy_offload": "for each tier below: write: on_evict",
    "save_unfull_chunk": "only whole chunks are stored",
    "min_retrieve_tokens": "load_policy: cost_model decides by what loading and computing take",
    "pre_caching_hash_algorithm": "kvtier serve sets vLLM's own --prefix-caching-hash-algo",
    "hash_algorithm": "kvtier serve sets vLLM's own --prefix-caching-hash-algo",
    "numa_mode": "CPU memory lies beside the GPUs",
    "remote_serde": "codec of the object tier loses no bit",
    "l2_store_policy": "CPU memory is a cache of its own",
    "use_gds": "gds: auto takes it where the driver can",
    "l1_use_hugepages": "huge_pages: true, for the cpu tier",
    "local_cpu_use_hugepages": "huge_pages: true, for the cpu tier",
}


class Migration(msgspec.Struct):
    """A stack, and what is to be said about it."""

    stack: dict[str, Any] = {}
    tiers: list[dict[str, Any]] = []
    notes: list[str] = []
    model: str = "MODEL"
    flags: list[str] = []
    """Of vLLM's server, those that stay."""
    deadline: float | None = None

    def cpu(self, size: float) -> None:
        """A first tier of so many bytes."""
        self.tiers.append({"kind": "cpu", "capacity": str(ByteSize(int(size)))})

    def disk(self, path: str, size: float | None, **more: Any) -> None:
        """A tier in a folder: one of its own below the other cache's, whose files stay as they
        are."""
        if not size:
            self.notes.append(f"{path} had no bound; the nvme tier has one: change it if you like")
        capacity = str(ByteSize(int(size))) if size else _DISK
        tier = {"kind": "nvme", "path": str(Path(path) / "kvtier"), "capacity": capacity}
        self.tiers.append(tier | more)

    def bucket(self, url: str, size: float | None, **more: Any) -> None:
        """A tier in a store."""
        if not size:
            self.notes.append(f"{url} had no bound; the object tier has one: change it if you like")
        capacity = str(ByteSize(int(size))) if size else _BUCKET
        given = {name: value for name, value in more.items() if value}
        self.tiers.append({"kind": "object", "url": url, "capacity": capacity, **given})

    def lacks(self, names: Iterable[str], where: str = "") -> None:
        """These settings are in no stack."""
        for name in names:
            why = _NOTHING.get(name, "has no counterpart")
            if name in _SECRETS:
                why = "a secret stands in no stack: the environment, a profile or a role has it"
            self.notes.append(f"{where}{name}: {why}")


def migrate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | FLAGS...",
            help="LMCache's YAML file, or the flags of vLLM or of `lmcache server`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the stack that does what vLLM's own offloading, or LMCache, was told to do.

    What has no counterpart is in its comments. Blocks that the other cache has stored stay where
    they are; kvtier cannot read them.
    """
    found = _read(words or [])
    console.say(_text(found))


def _read(words: Sequence[str]) -> Migration:
    if len(words) == 1 and not words[0].startswith("-"):
        return _of_file(Path(words[0]))
    if words[:2] == ["lmcache", "server"] or any(each.startswith("--l1-") for each in words):
        return _of_lmcache_server(words)
    if words:
        return _of_vllm(words)
    raise ConfigError("migrate", "says nothing to migrate from", _FORM)


def _text(found: Migration) -> str:
    """The stack file, checked but for what only its own machine can tell."""
    import yaml

    found.stack = {"version": 1, **found.stack, "tiers": found.tiers}
    for tier in found.tiers[1:]:
        if found.deadline is not None:
            tier["load_deadline"] = f"{found.deadline:g}s"
    load(json.loads(json.dumps(found.stack)), here=False)
    whole = json.loads(json.dumps(found.stack).replace("${", "$${"))
    flags = f" -- {shlex.join(found.flags)}" if found.flags else ""
    comments = [
        "Look through it, write it to stack.yaml, then: kvtier config check stack.yaml",
        f"Serve with it: kvtier serve {shlex.quote(found.model)} --config stack.yaml{flags}",
        *(["Not in it:", *(f"- {each}" for each in found.notes)] if found.notes else []),
    ]
    head = "".join(f"# {each}\n" for each in console.plain("\n".join(comments)).splitlines())
    return head + yaml.safe_dump(whole, sort_keys=False, allow_unicode=True).rstrip()


# -- vLLM's own offloading -------------------------------------------------------------------------


def _of_vllm(words: Sequence[str]) -> Migration:
    found = Migration()
    taken, rest = _flags(words, _VLLM_FLAGS)
    if rest[:2] == ["vllm", "serve"] and len(rest) > 2:
        found.model, rest = rest[2], rest[3:]
    found.flags = rest
    (text,) = taken.get("kv-transfer-config", ["{}"])[-1:]
    transfer = _json(text, "--kv-transfer-config")
    extra = _mapping(transfer.get("kv_connector_extra_config"), "kv_connector_extra_config")
    backend = taken.get("kv-offloading-backend", ["native"])[-1]
    connector = str(transfer.get("kv_connector", "OffloadingConnector"))
    if backend == "lmcache" or connector.startswith("LMCache"):
        problem = "names LMCache, which is told elsewhere what to keep"
        remedy = "give its YAML file, or the flags of `lmcache server`"
        raise ConfigError("--kv-transfer-config", problem, remedy)
    if connector not in ("OffloadingConnector", "SimpleCPUOffloadConnector"):
        raise ConfigError("--kv-transfer-config", f"{connector} is no offloading of vLLM's", _FORM)
    size = extra.pop("cpu_bytes_to_use", None)
    if "kv-offloading-size" in taken:
        size = _number(taken["kv-offloading-size"][-1], "--kv-offloading-size") * _GIB
    if size is None:
        raise ConfigError("--kv-offloading-size", "is missing: how much CPU memory is used", _FORM)
    found.cpu(_number(size, "cpu_bytes_to_use"))
    _chunks_of_vllm(found, extra)
    _disk_of_simple(found, extra)
    tiers = extra.pop("secondary_tiers", None) or []
    for tier in tiers if isinstance(tiers, list) else [tiers]:
        _tier_of_vllm(found, _mapping(tier, "secondary_tiers"))
    _policies_of_vllm(found, extra)
    transfer.pop("kv_role", None)
    transfer.pop("kv_connector", None)
    transfer.pop("kv_connector_extra_config", None)
    if transfer.pop("kv_load_failure_policy", "recompute") != "recompute":
        found.notes.append("kv_load_failure_policy: kvtier serve sets recompute")
    found.lacks(transfer)
    found.lacks(extra)
    return found


def _chunks_of_vllm(found: Migration, extra: dict[str, Any]) -> None:
    given, _ = _flags(found.flags, ("block-size",))
    block = _VLLM_BLOCK
    if given:
        block = int(_number(given["block-size"][-1], "--block-size"))
    chunk = extra.pop("block_size", None)
    blocks = extra.pop("blocks_per_chunk", None)
    if blocks is not None:
        chunk = _number(blocks, "blocks_per_chunk") * block
    if chunk is not None:
        found.stack["chunk_tokens"] = int(_number(chunk, "block_size"))


def _disk_of_simple(found: Migration, extra: dict[str, Any]) -> None:
    """The disk of SimpleCPUOffloadConnector."""
    path, size = extra.pop("disk_path", None), extra.pop("disk_capacity_bytes", 100 * _GIB)
    if path:
        found.disk(str(path), _number(size, "disk_capacity_bytes"))


def _tier_of_vllm(found: Migration, tier: dict[str, Any]) -> None:
    kind = tier.pop("type", None)
    if kind == "fs":
        names = [name for name in ("n_read_threads", "n_write_threads") if name in tier]
        threads = [int(_number(tier.pop(name), name)) for name in names]
        more = {"threads": max(threads)} if threads else {}
        found.disk(str(tier.pop("root_dir", "")), None, **more)
        found.notes.append(
            "a root_dir that several machines mount: no nvme tier, but kind: object with its url "
            "file:///folder"
        )
    elif kind == "obj":
        store = _mapping(tier.pop("store_config", None), "store_config")
        prefix = str(tier.pop("prefix", "")).strip("/")
        url = f"s3://{store.pop('bucket', '')}/{prefix}".rstrip("/")
        host, scheme = store.pop("endpoint_override", ""), store.pop("scheme", "http")
        endpoint = host if "://" in host else f"{scheme}://{host}" if host else None
        threads = tier.pop("io_threads", None)
        more = {name: store.pop(name, None) for name in ("region", "ca_bundle")}
        found.bucket(url, None, endpoint=endpoint, threads=threads, **more)
        found.lacks(store, "store_config: ")
    else:
        found.notes.append(f"secondary tier of type {kind}: kvtier has no such tier")
        return
    found.lacks(tier, f"{kind}: ")


def _policies_of_vllm(found: Migration, extra: dict[str, Any]) -> None:
    if (policy := extra.pop("eviction_policy", None)) is not None:
        _evict(found, str(policy))
    if _number(extra.pop("store_threshold", 0), "store_threshold") > 1:
        for tier in found.tiers:
            tier["admission"] = "second_touch"
    if extra.pop("offload_prompt_only", None):
        found.notes.append("offload_prompt_only: the same, in vLLM's kv_connector_extra_config")


# -- LMCache ---------------------------------------------------------------------------------------


def _of_file(file: Path) -> Migration:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(str(file), problem, "name LMCache's YAML file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(str(file), f"is no YAML: {error}", "name LMCache's YAML file") from error
    if not isinstance(values, dict) or not values:
        raise ConfigError(str(file), "holds no settings", "name LMCache's YAML file")
    if "tiers" in values:
        raise ConfigError(str(file), "is a stack of kvtier's already", "kvtier config check it")
    return _of_lmcache({str(name): value for name, value in values.items()})


def _of_lmcache(values: dict[str, Any]) -> Migration:
    """The settings of LMCache inside vLLM."""
    found, extra = Migration(), _mapping(values.pop("extra_config", None), "extra_config")
    found.stack["chunk_tokens"] = int(_number(values.pop("chunk_size", 256), "chunk_size"))
    size = _number(values.pop("max_local_cpu_size", 5.0), "max_local_cpu_size") * _GIB
    if values.pop("local_cpu", True):
        found.cpu(size)
        found.notes.append("max_local_cpu_size was of each rank: multiply capacity by the ranks")
    else:
        found.tiers.append({"kind": "cpu", "capacity": _LEAST})
        found.notes.append("local_cpu: false: blocks pass through CPU memory; give it some")
    disks = _number(values.pop("max_local_disk_size", 0.0), "max_local_disk_size") * _GIB
    for name in ("local_disk", "gds_path"):
        paths = values.pop(name, None) or []
        for path in [paths] if isinstance(paths, str) else paths:
            found.disk(str(path).removeprefix("file://"), disks)
    if remote := values.pop("remote_url", None):
        _remote(found, str(remote), extra)
    if policy := values.pop("cache_policy", None):
        _evict(found, str(policy))
    if (seconds := values.pop("blocking_timeout_secs", None)) is not None:
        found.deadline = _number(seconds, "blocking_timeout_secs")
    if values.pop("save_decode_cache", False):
        found.notes.append("save_decode_cache: offload_prompt_only: false, in vLLM's extra config")
    found.lacks(values)
    found.lacks(extra, "extra_config: ")
    return found


def _of_lmcache_server(words: Sequence[str]) -> Migration:
    found = Migration()
    taken, rest = _flags(words, _LMCACHE_FLAGS)
    size = taken.get("l1-size-gb")
    if size is None:
        raise ConfigError("--l1-size-gb", "is missing: how much CPU memory is used", _FORM)
    found.stack["chunk_tokens"] = int(_number(taken.get("chunk-size", ["256"])[-1], "--chunk-size"))
    found.cpu(_number(size[-1], "--l1-size-gb") * _GIB)
    for path in taken.get("gds-l1-path", []):
        found.disk(path, None)
    for text in taken.get("l2-adapter", []):
        _adapter(found, _json(text, "--l2-adapter"))
    if policies := taken.get("eviction-policy"):
        _evict(found, policies[-1])
    given = [each.partition("=")[0] for each in rest if each.startswith("--")]
    found.lacks(each.removeprefix("--").replace("-", "_") for each in given)
    return found


def _adapter(found: Migration, adapter: dict[str, Any]) -> None:
    kind = adapter.pop("type", None)
    size = _number(adapter.pop("max_capacity_gb", 0) or 0, "max_capacity_gb") * _GIB
    if kind in ("fs", "fs_native"):
        workers = adapter.pop("num_workers", None)
        more = {} if workers is None else {"threads": int(_number(workers, "num_workers"))}
        found.disk(str(adapter.pop("base_path", "")), size, **more)
        for name in ("use_odirect", "eviction", "relative_tmp_dir", "read_ahead_size"):
            adapter.pop(name, None)  # a disk is read directly, and evicts, in any case
    elif kind == "s3":
        plain = bool(adapter.pop("disable_tls", False))
        region = adapter.pop("s3_region", None)
        address = str(adapter.pop("s3_endpoint", ""))
        _virtual_host(found, address, region, plain=plain, size=size)
        adapter.pop("eviction", None)
    else:
        found.notes.append(f"--l2-adapter of type {kind}: kvtier has no such tier")
        return
    found.lacks(adapter, f"{kind}: ")


def _remote(found: Migration, url: str, extra: dict[str, Any]) -> None:
    parts = _url(url)
    if parts.scheme == "s3":
        plain = bool(extra.pop("disable_tls", False))
        _virtual_host(found, url, extra.pop("s3_region", None), plain=plain, size=0)
    elif parts.scheme == "fs":
        found.bucket(f"file://{parts.path}/kvtier", None)
    else:
        found.notes.append(f"remote_url of {parts.scheme or url}: kvtier has no such tier")


def _virtual_host(
    found: Migration, address: str, region: str | None, *, plain: bool, size: float
) -> None:
    """LMCache names a bucket in front of its server: s3://bucket.server."""
    parts = _url(address if "://" in address else f"s3://{address}")
    bucket, _, host = parts.netloc.partition(".")
    amazon = host.endswith((".amazonaws.com", ".amazonaws.com.cn")) or not host
    endpoint = None if amazon else f"{'http' if plain else 'https'}://{host}"
    addressing = None if amazon else "virtual"
    url = f"s3://{bucket}{parts.path}".rstrip("/")
    found.bucket(url, size, endpoint=endpoint, region=region, addressing=addressing)


# -- what both have --------------------------------------------------------------------------------


def _evict(found: Migration, policy: str) -> None:
    if policy.lower() == "lru":
        for tier in found.tiers:
            tier["eviction"] = "lru"
    else:
        found.notes.append(f"eviction {policy}: the default policy of each tier learns by itself")


def _flags(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of some flags, and all other words."""
    taken: dict[str, list[str]] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        flag = name.removeprefix("--").replace("_", "-")
        if not name.startswith("--") or flag not in names:
            rest.append(word)
            continue
        taken.setdefault(flag, []).append(value if equals else next(left, ""))
    return taken, rest


def _number(value: object, place: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < 1 << 60:
        raise ConfigError(place, f"{value!r} is no number", "write what it was served with")
    return number


def _url(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError as error:
        raise ConfigError(text, f"is no url: {error}", "write what it was served with") from error


def _json(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(place, f"is no JSON: {error}", "write it as vLLM takes it") from error
    return _mapping(found, place)


def _mapping(value: object, place: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ConfigError(place, f"{value!r} has no settings", "write what it was served with")
    return {str(name): each for name, each in (value or {}).items()}
