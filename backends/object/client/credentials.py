"""Credentials from botocore's default chain, and requests signed by botocore's own signer.

The chain is the one every AWS tool uses: environment, profile, web identity, role, instance. What
can expire is refreshed by botocore while running; a token that the store calls expired makes the
chain start anew, so that rotated files and variables are picked up without a restart.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec

from kvtier.backends.object.stores.errors import NoCredentials, WrongRegion
from kvtier.core.system.abandonable_calls import abandonable
from kvtier.errors import ExtraMissing

_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
_RENEW_PAUSE_S = 10.0
_MANDATORY_S = 60.0
"""Credentials with less time left than this must be refreshed before they are used."""
_AHEAD_S = 910.0
"""With less time left, botocore asks for others each time that it is asked for these, and whoever
asks it waits: a moment sooner they are asked for here, and nobody waits."""
_AGAIN_S = 30.0
"""The shortest time between two times of asking ahead of need: many hand out credentials that never
have more than a quarter of an hour left, or the same ones until shortly before their end."""
_CONNECT_S = 2.0
_READ_S = 5.0
_ATTEMPTS = 2
"""For the services that hand out credentials: botocore would wait for minutes."""
_ASKING_S = 8.0
"""How long a call waits for all else, like a program of the user's, which may never end: less where
its own deadline comes first."""
_HANGS_S = 120.0
"""Who has not answered for so long never will, and is asked anew. The next one has twice as long:
each that hangs leaves a thread behind, and these must not become many."""
_LATE = (
    "credentials are not handed out in time: check the program, the server or the metadata service "
    "that this machine has them from"
)
UNSIGNED = {"payload_signing_enabled": False}
"""Bodies are not hashed a second time: every record carries its own checksum."""


def vendor(module: str) -> Any:
    """A module of the `s3` extra, imported when it is needed and not before."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ExtraMissing("an s3:// store", "s3") from error


class _Unsigned(msgspec.Struct):
    """What botocore's signer looks at in a request, and nothing else."""

    method: str
    url: str
    headers: dict[str, str]
    context: dict[str, Any]
    params: None = None
    body: None = None


class Signer:
    """Signs requests of one region with whatever credentials are valid now. Thread-safe.

    Credentials are looked for when the first request is signed, and until some are found: a machine
    whose role is not there yet starts all the same.
    """

    def __init__(self, region: str | None, profile: str | None = None) -> None:
        self._profile = profile
        self._auth = vendor("botocore.auth")
        self._context = {"client_config": vendor("botocore.config").Config(s3=UNSIGNED)}
        self._lock = threading.Lock()
        self._renewed_at = time.monotonic()
        self._failed_at = 0.0
        self._failure = ""
        self._credentials: Any = None
        self._asking: Future[Any] | None = None
        self._asked_at = 0.0
        self._hangs_after = _HANGS_S
        self._given: tuple[Any, Any] = None, None
        """Credentials, and what they were when somebody has asked for them last."""
        self.session = self._new_session()
        try:
            named = self.session.get_config_variable("profile")  # ours, or the environment's
            missing = named is not None and named not in self.session.available_profiles
            # which raises if the profile is missing, and does not name it
            configured, self.ca_bundle = [
                None if missing else self.session.get_config_variable(each)
                for each in ("region", "ca_bundle")
            ]
        except Exception as error:  # noqa: BLE001 - see `credentials`
            raise unobtainable(error) from None
        if missing:
            where = "" if profile else ", which the environment names"
            raise NoCredentials(f"there is no AWS profile {named!r}{where}: correct it or its file")
        self.ca_bundle = self.ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")  # as botocore does
        self.region = check_region(region or configured or "us-east-1")
        # at DEBUG botocore logs whole requests and answers, which contain session tokens
        logging.getLogger("botocore").setLevel(logging.INFO)
        for part in ("credentials", "tokens"):
            logging.getLogger(f"botocore.{part}").addFilter(_without_trace)

    def __repr__(self) -> str:
        return f"Signer(region={self.region!r})"

    def sign(
        self, method: str, url: str, headers: dict[str, str], deadline: float
    ) -> dict[str, str]:
        """`headers` with the signature added; the body stays unsigned."""
        request = _Unsigned(method, url, headers, dict(self._context))
        self._auth.S3SigV4Auth(self.credentials(deadline), "s3", self.region).add_auth(request)
        return request.headers

    def credentials(self, deadline: float) -> Any:
        """Those that are valid now; raises NoCredentials, by the deadline if they are not to be had
        until then.

        Anything may go wrong behind this: programs and files of the user's, and the code that
        reads what they say.
        """
        asked_at = time.monotonic()
        known, frozen = self._given
        if known is not None and not _ends_within(known, _MANDATORY_S):
            with contextlib.suppress(Exception):
                return _sound(self._at_hand(known, frozen))
        left = min(deadline - asked_at, threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=max(0.0, left)):
            raise NoCredentials(_LATE)
        try:
            if self._failed_at > asked_at:  # the one before us has asked in vain
                raise NoCredentials(self._failure)
            try:
                return _sound(self._ask(deadline))
            except NoCredentials as error:
                failure = error
            except Exception as error:  # noqa: BLE001
                failure = unobtainable(error)
            if time.monotonic() < deadline:  # others may have more time than we had
                self._failed_at = time.monotonic()
                self._failure = str(failure)
            raise failure from None
        finally:
            self._lock.release()

    def _at_hand(self, known: Any, frozen: Any) -> Any:
        """These, which are still good. Where they end soon others are asked for, and not waited
        for: that may hang, or go wrong."""
        if not _ends_within(known, _AHEAD_S):
            return known.get_frozen_credentials()
        lately = time.monotonic() - self._asked_at < _AGAIN_S
        if not lately and self._lock.acquire(blocking=False):  # else somebody asks just now
            try:
                with contextlib.suppress(RuntimeError):  # there is no thread to ask in
                    self._begin_to_ask()
            finally:
                self._lock.release()
        return frozen

    def _ask(self, deadline: float) -> Any:
        """Under the lock. Who has waited long enough leaves the answer to those who come."""
        asking = self._begin_to_ask()
        try:
            return asking.result(max(0.0, min(_ASKING_S, deadline - time.monotonic())))
        except TimeoutError:
            if asking.done():
                raise  # it is the answer
            raise NoCredentials(_LATE) from None

    def _begin_to_ask(self) -> Future[Any]:
        """Under the lock: not once more while somebody is being asked, who may yet answer."""
        asked_for = time.monotonic() - self._asked_at
        if self._asking is not None and not self._asking.done() and asked_for > self._hangs_after:
            self._hangs_after *= 2
            self._start_anew()  # in the old chain all wait for the one who hangs
            self._asking = None
        if self._asking is None or self._asking.done():
            self._asked_at = time.monotonic()
            self._asking = abandonable(self._obtain, "kvtier-credentials")
        return self._asking

    def _obtain(self) -> Any:
        found = self._find()
        frozen = found.get_frozen_credentials()
        self._given = found, frozen
        self._hangs_after = _HANGS_S
        return frozen

    def renew(self) -> None:
        """Ask the chain again, at most every few seconds, and not while it is being asked."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._renewed_at >= _RENEW_PAUSE_S:
                self._renewed_at = time.monotonic()
                self._start_anew()
                self._given = None, None
        finally:
            self._lock.release()

    def _start_anew(self) -> None:
        self.session = self._new_session()
        self._credentials = None

    def _new_session(self) -> Any:
        session = vendor("botocore.session").Session(profile=self._profile)
        session.set_default_client_config(
            vendor("botocore.config").Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"total_max_attempts": _ATTEMPTS},
            )
        )
        return session

    def _find(self) -> Any:
        if self._credentials is None:
            self._credentials = self.session.get_credentials()
        if self._credentials is None:
            raise NoCredentials(
                "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "name a profile, or give this machine a role"
            )
        return self._credentials


def _without_trace(record: logging.LogRecord) -> bool:
    """Of what went wrong botocore logs everything that a credential helper printed."""
    record.exc_info = record.exc_text = None
    return True


def unobtainable(error: Exception) -> NoCredentials:
    """By its kind alone: the text may quote what a credential helper printed."""
    return NoCredentials(
        f"credentials cannot be obtained ({type(error).__name__}): check the profile, the role and "
        "the AWS_ variables"
    )


def _sound(frozen: Any) -> Any:
    """These credentials, if they can stand in the head of a request."""
    for text in (frozen.access_key, frozen.token or ""):
        if not (text.isascii() and text.isprintable()):
            raise NoCredentials(
                "the access key or the session token has a character that none has, or the end of "
                "a line: write it anew"
            )
    return frozen


def check_region(region: str) -> str:
    """`region`, or WrongRegion: it becomes a part of header fields and host names."""
    if not _REGION.fullmatch(region):
        raise WrongRegion(f"{region[:40]!r} is no region: write one like eu-west-1")
    return region


def _ends_within(credentials: Any, seconds: float) -> bool:
    """Whether these expire so soon: some never do."""
    needed = getattr(credentials, "refresh_needed", None)
    return needed is not None and bool(needed(seconds))


def request_head(method: str, target: str, headers: dict[str, str], body_bytes: int) -> bytes:
    """The first part of an HTTP/1.1 request."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if method == "PUT" or body_bytes:
        fields += f"content-length: {body_bytes}\r\n"
    return f"{method} {target} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")
