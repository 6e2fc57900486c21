"""Requests to one bucket: addressed, signed and sent over kept connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from urllib.parse import quote

from kvtier import __version__
from kvtier.backends.object.client.credentials import CredentialChain
from kvtier.backends.object.client.http.connection import Response
from kvtier.backends.object.client.http.connection_pool import ConnectionPool
from kvtier.backends.object.client.http.endpoint import bucket_address
from kvtier.backends.object.client.http.proxy import proxy_for
from kvtier.backends.object.client.http.tls import TrustStore
from kvtier.backends.object.client.s3_settings import S3Settings, addressing_style, check_settings
from kvtier.backends.object.client.signer import Signer, request_head
from kvtier.backends.object.client.status_errors import error_code, response_error
from kvtier.backends.object.stores.errors import ExpiredToken, ObjectTooLarge, StoreError
from kvtier.backends.object.stores.store import Buffer

ERROR_BODY_BYTES_MAX = 64 << 10
_BODY_BYTES_MAX = 8 << 20
_ROTATED_CODES = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity"}
"""Of credentials that were rotated, whether key and secret or the secret alone."""
_USER_AGENT = {"user-agent": f"kvtier/{__version__}"}
"""Some firewalls in front of stores refuse requests without it."""


class BucketClient:
    """Sends requests to one bucket. Opening it makes no request."""

    def __init__(self, settings: S3Settings) -> None:
        check_settings(settings)
        chain = CredentialChain(settings.profile)
        self._signer = Signer(chain, settings.region)
        endpoint = settings.endpoint or self._signer.find_endpoint()
        style = addressing_style(settings, endpoint)
        self.address, base = bucket_address(endpoint, settings.bucket, style)
        self.where = f"bucket {settings.bucket} at {self.address}"
        """How messages name it."""
        self._bucket_target = base.rstrip("/") or "/"
        self._base = base
        default_port = ":443" if self.address.tls else ":80"
        self._host = self.address.host_and_port.removesuffix(default_port)
        self._origin = f"{self.address.scheme}://{self._host}"
        proxy = proxy_for(self.address)
        # to http:// a proxy gets the request itself, to https:// it is only a tunnel
        forwards = proxy is not None and not self.address.tls
        self._target_prefix = self._origin if forwards else ""
        self._unsigned = _USER_AGENT | (proxy.headers() if proxy is not None and forwards else {})
        trust = TrustStore(settings.ca_bundle or chain.ca_bundle) if self.address.tls else None
        self.pool = ConnectionPool(
            self.address,
            settings.timeouts,
            proxy=proxy,
            trust=trust,
            keep_max=settings.connections,
        )

    def exchange(
        self,
        method: str,
        key: str,
        end: float,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Buffer] = (),
    ) -> AbstractContextManager[Response]:
        """One request about an object, and its response."""
        target = self._base + quote(key, safe="/-_.~")
        return self._signed(method, target, end, headers or {}, body)

    def query(
        self,
        method: str,
        query: str,
        end: float,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> bytes:
        """One request about the bucket, like a listing; the body of a successful response."""
        target = f"{self._bucket_target}?{query}"
        content = [memoryview(body)] if body else []
        with self._signed(method, target, end, headers or {}, content) as response:
            if response.status != 200:
                raise self.error(response)
            return response.read(_BODY_BYTES_MAX)

    def _signed(
        self,
        method: str,
        target: str,
        end: float,
        headers: Mapping[str, str],
        body: Sequence[Buffer],
    ) -> AbstractContextManager[Response]:
        fields = {"host": self._host, **headers}
        fields = self._signer.sign(method, self._origin + target, fields, end)
        # the rest is not signed, because some proxies change it on the way
        if method == "GET":
            fields["accept-encoding"] = "identity"
        fields |= self._unsigned
        size = sum(view.nbytes for view in body)
        head = request_head(method, self._target_prefix + target, fields, size)
        return self.pool.exchange(method, head, body, end)

    def error(
        self, response: Response, body: bytes | None = None, *, reading: bool = False
    ) -> StoreError:
        """What a response that is not a success means. `body`: if it is read already."""
        code = error_code(error_body(response) if body is None else body)
        error = response_error(response.status, code, response.headers, self.where, reading=reading)
        if isinstance(error, ExpiredToken) or code in _ROTATED_CODES or response.status == 401:
            self._signer.chain.renew()
        return error

    def close(self) -> None:
        self.pool.close()


def error_body(response: Response) -> bytes:
    """The body of an error; empty if it is a whole web page, whose status must do."""
    try:
        return response.read(ERROR_BODY_BYTES_MAX)
    except ObjectTooLarge:
        return b""
