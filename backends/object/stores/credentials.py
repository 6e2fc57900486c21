"""Credentials from botocore's default chain, looked up without holding requests up.

The chain is the one that every AWS tool uses: environment, profile, web identity, role, instance.
botocore refreshes what can expire. When the store calls a token expired, the chain starts anew, so
that rotated files and variables are picked up without a restart.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

from kvtier.backends.object.stores.errors import NoCredentials, WrongEndpoint
from kvtier.system.calls import abandonable

_RENEW_PAUSE_S = 10.0
_REFRESH_FIRST_S = 60.0
"""Credentials with less time left than this are refreshed before they are used."""
_REFRESH_AHEAD_S = 910.0
"""Credentials with less time left than this are refreshed in the background. botocore would do it
whenever it is asked for them, and its caller would wait."""
_AHEAD_PAUSE_S = 30.0
"""The shortest time between two refreshes in the background: many services hand out credentials
that never have a quarter of an hour left, or the same ones until shortly before their end."""
_CONNECT_S = 2.0
_READ_S = 5.0
_ATTEMPTS = 2
"""For the services that hand out credentials: botocore would wait for minutes."""
_LOOKUP_S = 8.0
"""How long a call waits for a lookup, unless its own deadline comes first: a program of the user's
may never end."""
_HANGS_S = 120.0
"""A lookup that takes longer never ends, and another is begun. That one has twice as long: each
lookup that hangs leaves a thread behind, and these must not become many."""
_LATE = (
    "credentials are not handed out in time: check the program, the server or the metadata service "
    "that this machine has them from"
)


class CredentialChain:
    """The credentials of one profile. Thread-safe.

    They are looked up when the first request is signed, and again until some are found. So a
    machine starts even if its role is not there yet.
    """

    def __init__(self, profile: str | None = None) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        """Held for a moment only: lookups run in threads of their own, one at a time."""
        self._renewed_at = time.monotonic()
        self._source: Any = None
        """botocore's object that refreshes credentials."""
        self._found: tuple[Any, Any] = None, None
        """The source of the last lookup, and the credentials that it returned."""
        self._lookup: Future[Any] | None = None
        self._lookup_began = 0.0
        self._hangs_after_s = _HANGS_S
        self._session = self._new_session()
        try:
            named = self._session.get_config_variable("profile")  # ours, or the environment's
            missing = named is not None and named not in self._session.available_profiles
            # which raises if the profile is missing, and does not name it
            self.region, ca_bundle = [
                None if missing else self._session.get_config_variable(each)
                for each in ("region", "ca_bundle")
            ]
        except Exception as error:  # noqa: BLE001 - see `credentials`
            raise _credentials_error(error) from None
        if missing:
            where = "" if profile else ", which the environment names"
            raise NoCredentials(f"there is no AWS profile {named!r}{where}: correct it or its file")
        self.ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")  # as botocore does
        _keep_secrets_out_of_logs()

    def credentials(self, deadline: float) -> Any:
        """Credentials that are valid now; raises NoCredentials, at the latest at the deadline.

        Anything may be raised behind this, by programs and files of the user's and by the code
        that reads their output.
        """
        try:
            with self._lock:
                source, frozen = self._found
                usable = source is not None and not _expires_within(source, _REFRESH_FIRST_S)
                if usable and not self._may_refresh(source):
                    return frozen
                try:
                    lookup = self._begin_lookup()
                except RuntimeError:  # no thread can be started
                    if not usable:
                        raise
            if usable:
                return frozen
            return lookup.result(max(0.0, min(_LOOKUP_S, deadline - time.monotonic())))
        except NoCredentials as error:
            raise NoCredentials(str(error)) from None  # many callers may share this one
        except TimeoutError as error:
            raised = lookup.done()  # by the lookup itself
            raise (_credentials_error(error) if raised else NoCredentials(_LATE)) from None
        except Exception as error:  # noqa: BLE001
            raise _credentials_error(error) from None

    def _may_refresh(self, source: Any) -> bool:
        """Whether credentials that are good for a while are refreshed in the background now."""
        lately = time.monotonic() - self._lookup_began < _AHEAD_PAUSE_S
        return not lately and _expires_within(source, _REFRESH_AHEAD_S)

    def _begin_lookup(self) -> Future[Any]:
        """Holding the lock. The lookup that is under way, or a new one."""
        taken_s = time.monotonic() - self._lookup_began
        if self._lookup is not None and not self._lookup.done():
            if taken_s <= self._hangs_after_s:
                return self._lookup
            self._hangs_after_s *= 2
            self._reset()  # in the old session every lookup waits for the one that hangs
        self._lookup_began = time.monotonic()
        self._lookup = abandonable(self._look_up, "kvtier-credentials")
        return self._lookup

    def _look_up(self) -> Any:
        source = self._find_source()
        frozen = source.get_frozen_credentials()
        for text in (frozen.access_key, frozen.token or ""):
            if not (text.isascii() and text.isprintable()):  # it stands in the head of a request
                raise NoCredentials(
                    "the access key or the session token has a character that none has, or the "
                    "end of a line: write it anew"
                )
        self._found = source, frozen
        self._hangs_after_s = _HANGS_S
        return frozen

    def _find_source(self) -> Any:
        if self._source is None:
            self._source = self._session.get_credentials()
        if self._source is None:
            raise NoCredentials(
                "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "name a profile, or give this machine a role"
            )
        return self._source

    def provide(self) -> dict[str, Any]:
        """The credentials that the last lookup found, as obstore's client wants them. It asks again
        for each request, because these never have the five minutes left for which it would keep
        them."""
        frozen = self._found[1] or self.credentials(time.monotonic() + _LOOKUP_S)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.datetime.now(datetime.UTC),
        }

    def find_endpoint(self, region: str) -> str:
        """The endpoint of S3 by the environment, the profile or the region; makes no request."""
        nobody = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}
        try:
            # botocore's own client, which boto3 wraps: a second wrapper of one session is an error
            client = self._session.create_client("s3", region_name=region, **nobody)
        except Exception as error:  # noqa: BLE001 - files and variables of the user's
            raise WrongEndpoint(
                f"no endpoint can be found ({type(error).__name__}): check region and endpoint, "
                "AWS_ENDPOINT_URL and the AWS config file"
            ) from None
        return str(client.meta.endpoint_url)

    def renew(self) -> None:
        """Ask the chain again, at most every few seconds, and not while it is being asked."""
        with self._lock:
            asking = self._lookup is not None and not self._lookup.done()
            if not asking and time.monotonic() - self._renewed_at >= _RENEW_PAUSE_S:
                self._renewed_at = time.monotonic()
                self._reset()
                self._found = None, None

    def _reset(self) -> None:
        self._session = self._new_session()
        self._source = None

    def _new_session(self) -> Any:
        session = importlib.import_module("botocore.session").Session(profile=self._profile)
        session.set_default_client_config(
            importlib.import_module("botocore.config").Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"total_max_attempts": _ATTEMPTS},
            )
        )
        return session


def _keep_secrets_out_of_logs() -> None:
    """At DEBUG botocore logs whole requests and responses, which contain session tokens. With a
    failure it logs everything that a credential helper printed."""
    logging.getLogger("botocore").setLevel(logging.INFO)
    for part in ("credentials", "tokens"):
        logging.getLogger(f"botocore.{part}").addFilter(_drop_trace)


def _drop_trace(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True


def _credentials_error(error: Exception) -> NoCredentials:
    """Quotes only the kind of error: its text may contain what a credential helper printed."""
    return NoCredentials(
        f"credentials cannot be obtained ({type(error).__name__}): check the profile, the role and "
        "the AWS_ variables"
    )


def _expires_within(source: Any, seconds: float) -> bool:
    needed = getattr(source, "refresh_needed", None)  # some never expire
    return needed is not None and bool(needed(seconds))
