"""The object tier: a bucket, or a folder, that many servers share and that outlives them."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Literal

from kvtier.backends.object.budget.claims import LEASE_S
from kvtier.backends.object.client.sockets import Timeouts
from kvtier.backends.object.handler import ObjectHandler
from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.keeper_limits import Limits, Spared
from kvtier.backends.object.housekeeping.read_only_keeper import Reader
from kvtier.backends.object.spec import ObjectSpec
from kvtier.backends.object.stores.errors import Misconfigured, StoreError
from kvtier.backends.object.stores.open_store import StoreSettings, open_store, place_of
from kvtier.backends.object.stores.s3_store import S3Settings, check_reach
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.tier import ObjectTier
from kvtier.core.eviction import create_policy, policy_class
from kvtier.core.interfaces.backend import Backend, TierContext
from kvtier.core.records.compression import Codec, codec_for
from kvtier.core.settings import (
    Duration,
    Threads,
    TierSettings,
    WritePolicy,
    check_capacity,
    standing_folder,
)
from kvtier.core.system.disk import Disk
from kvtier.errors import ConfigError, MediumError, NotHere
from kvtier.types import Namespace

__all__ = [
    "BACKEND",
    "ObjectBackend",
    "ObjectHandler",
    "ObjectSettings",
    "ObjectSpec",
    "ObjectTier",
]

_log = logging.getLogger(__name__)
_DURATIONS_MIN = {
    "refresh": Duration(0.01),
    "audit": Duration(0.1),
    "age_max": Duration(1.0),
    "connect_timeout": Duration(0.001),
    "idle_timeout": Duration(0.001),
}
"""With less, the store is asked without a pause, or nothing can ever succeed."""


class ObjectSettings(TierSettings, frozen=True, kw_only=True, tag="object"):
    """Blocks in an S3 bucket or in a folder, shared by all servers with the same url.

    Credentials are never written here: they come from the environment, a profile or a role, as for
    every other AWS tool.
    """

    url: str
    """s3://bucket/prefix or file:///folder. Only objects below it are ever touched."""
    endpoint: str | None = None
    """An S3-compatible server, like https://minio.example:9000; without it, AWS."""
    region: str | None = None
    """The bucket's region, if neither the environment nor the profile names it."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket is in the path or in the host name; auto: the host for AWS, else path."""
    ca_bundle: str | None = None
    """A file with the certificates of the authorities to trust; without it, what AWS_CA_BUNDLE,
    the profile or REQUESTS_CA_BUNDLE names, or the system's."""
    profile: str | None = None
    """The AWS profile to take credentials from."""
    conditional_put: bool = True
    """Ask the store to refuse a block that it already has (If-None-Match)."""
    codec: Literal["auto", "none", "zstd", "split-zstd"] = "auto"
    """How payloads are compressed; auto: none in a folder, else what suits the data type."""
    age_max: Duration | None = None
    """Blocks that were stored longer ago than this are deleted."""
    refresh: Duration = Duration(5.0)
    """How often to look at what other servers have added and removed."""
    audit: Duration = Duration(600.0)
    """How often one of the servers lists everything, to find what no server has written down."""
    connect_timeout: Duration = Duration(1.0)
    """How long to wait for a connection."""
    idle_timeout: Duration = Duration(2.0)
    """How long to wait for the next byte."""
    threads: Threads = 32
    """How many objects are transferred at once."""
    unreachable: Literal["degrade", "refuse"] = "degrade"
    """What to do if the store cannot be used at start: go on without it until it can, or stop."""


class ObjectBackend(Backend[ObjectSettings]):
    """Opens the catalogue (with its keeper) and the data side of a store."""

    kind = "object"
    settings = ObjectSettings
    spec = ObjectSpec

    def check(self, settings: ObjectSettings, record_bytes: int | None) -> None:
        policy_class(settings.eviction)  # which raises ConfigError
        try:
            folder, bucket, _ = place_of(settings.url)
        except Misconfigured as error:
            raise _refused("url", error) from error
        _check_figures(settings)
        if folder is not None:
            standing_folder(folder, ".url", only_read=_only_read(settings))
        self._check_capacity(settings, folder, record_bytes or 4096)
        if folder is None:
            _check_bucket(settings, bucket)

    def _check_capacity(
        self, settings: ObjectSettings, folder: Path | None, record_bytes: int
    ) -> None:
        if folder is None and settings.capacity.share is not None:
            raise ConfigError(
                ".capacity", "a bucket has no size of its own", 'write a size, like "2TiB"'
            )
        check_capacity(settings.capacity, capacity_of(settings), record_bytes)

    def open_tier(
        self,
        settings: ObjectSettings,
        context: TierContext,
        store: Store | None = None,
        lease_s: float = LEASE_S,
        spared: Spared | None = None,
    ) -> ObjectTier:
        limits = Limits(
            capacity=capacity_of(settings),
            refresh_s=settings.refresh.seconds,
            audit_s=settings.audit.seconds,
            age_max_s=settings.age_max.seconds if settings.age_max else None,
            read_s=2 * settings.load_deadline.seconds,
            lease_s=lease_s,
            spared=spared or {},
        )
        try:
            kind = Reader if _only_read(settings) else Keeper
            keeper = kind(store or open_for(settings), context.namespace, limits)
        except StoreError as error:
            raise MediumError(str(error)) from error
        tier = ObjectTier(keeper, create_policy(settings.eviction))
        try:
            keeper.open(tier.known)
        except StoreError as error:
            if settings.unreachable == "refuse":
                keeper.close()
                raise MediumError(str(error)) from error
            _log.warning("the object store cannot be used yet, going on without it: %s", error)
        tier.start()
        keeper.start()
        return tier

    def open_handler(
        self, settings: ObjectSettings, context: TierContext, store: Store | None = None
    ) -> ObjectHandler:
        try:
            store = store or open_for(settings)
        except StoreError as error:
            raise MediumError(str(error)) from error
        return ObjectHandler(
            store,
            context.namespace,
            _codec(settings, context.namespace),
            threads=settings.threads,
            load_s=settings.load_deadline.seconds,
            store_s=settings.store_deadline.seconds,
        )

    def identity(self, settings: ObjectSettings) -> str | None:
        folder = place_of(settings.url).folder
        if folder is not None:
            return str(folder.resolve())
        return f"object:{settings.endpoint or ''}{settings.url.rstrip('/')}"


def _only_read(settings: ObjectSettings) -> bool:
    return settings.write is WritePolicy.NEVER


def open_for(settings: ObjectSettings) -> Store:
    """The store that a tier with these settings uses; raises StoreError, makes no request."""
    total_s = max(settings.load_deadline.seconds, settings.store_deadline.seconds)
    return open_store(
        StoreSettings(
            url=settings.url,
            endpoint=settings.endpoint,
            region=settings.region,
            addressing=settings.addressing,
            ca_bundle=settings.ca_bundle,
            profile=settings.profile,
            conditional_put=settings.conditional_put,
            connections=settings.threads,
            timeouts=Timeouts(
                settings.connect_timeout.seconds, settings.idle_timeout.seconds, total_s
            ),
        )
    )


def _check_figures(settings: ObjectSettings) -> None:
    for name, least in _DURATIONS_MIN.items():
        found: Duration | None = getattr(settings, name)
        if found is not None and found.seconds < least.seconds:
            raise ConfigError(f".{name}", f"{found} is too short", f"write at least {least}")


def _check_bucket(settings: ObjectSettings, bucket: str) -> None:
    if importlib.util.find_spec("boto3") is None:
        raise NotHere(
            ".url", "an s3:// store needs an optional package", "pip install 'kvtier[s3]'"
        )
    try:
        check_reach(S3Settings(bucket=bucket, endpoint=settings.endpoint, region=settings.region))
    except Misconfigured as error:
        raise _refused(error.setting, error) from error
    if settings.ca_bundle and not Path(settings.ca_bundle).is_file():
        problem = f"there is no file {settings.ca_bundle}"
        raise NotHere(".ca_bundle", problem, "name one with certificates, in PEM")


def _refused(setting: str, error: Misconfigured) -> ConfigError:
    problem, _, remedy = str(error).partition(": ")
    return ConfigError(f".{setting}", problem, remedy)


def capacity_of(settings: ObjectSettings) -> int:
    """The budget in bytes."""
    folder = place_of(settings.url).folder
    if folder is None:
        return settings.capacity.resolve(0)
    return settings.capacity.resolve(
        Disk().total_bytes(folder if folder.exists() else folder.parent)
    )


def _codec(settings: ObjectSettings, namespace: Namespace) -> Codec:
    if settings.codec == "auto" and place_of(settings.url).folder is not None:
        return Codec.RAW
    facts = namespace.facts
    cached_as = facts.get("kv_dtype", "auto")
    return codec_for(settings.codec, facts.get("dtype", "") if cached_as == "auto" else cached_as)


BACKEND = ObjectBackend()
