"""Requests signed by botocore's own signer, their heads, and the endpoint that botocore finds."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvtier.backends.object.client.credentials import CredentialChain
from kvtier.backends.object.client.extra import optional_module
from kvtier.backends.object.stores.errors import WrongEndpoint, WrongRegion

UNSIGNED_BODIES = {"payload_signing_enabled": False}
"""Bodies are not hashed a second time: every record carries its own checksum."""
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")


class _Request(msgspec.Struct):
    """What botocore's signer looks at in a request, and nothing else."""

    method: str
    url: str
    headers: dict[str, str]
    context: dict[str, Any]
    params: None = None
    body: None = None


class Signer:
    """Signs requests of one region with the credentials that are valid now. Thread-safe."""

    def __init__(self, chain: CredentialChain, region: str | None) -> None:
        self.chain = chain
        self.region = check_region(region or chain.region or "us-east-1")
        self._auth = optional_module("botocore.auth")
        config = optional_module("botocore.config").Config(s3=UNSIGNED_BODIES)
        self._context = {"client_config": config}

    def sign(
        self, method: str, url: str, headers: dict[str, str], deadline: float
    ) -> dict[str, str]:
        """`headers` with the signature added; the body stays unsigned."""
        request = _Request(method, url, headers, dict(self._context))
        credentials = self.chain.credentials(deadline)
        self._auth.S3SigV4Auth(credentials, "s3", self.region).add_auth(request)
        return request.headers

    def find_endpoint(self) -> str:
        """The endpoint by the environment, the profile or the region; makes no request."""
        nobody = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}
        try:
            # botocore's own client, which boto3 wraps: a second wrapper of one session is an error
            client = self.chain.session.create_client("s3", region_name=self.region, **nobody)
        except Exception as error:  # noqa: BLE001 - files and variables of the user's
            raise WrongEndpoint(
                f"no endpoint can be found ({type(error).__name__}): check region and endpoint, "
                "AWS_ENDPOINT_URL and the AWS config file"
            ) from None
        return str(client.meta.endpoint_url)


def check_region(region: str) -> str:
    """`region`, or WrongRegion: it becomes a part of header fields and host names."""
    if not _REGION.fullmatch(region):
        raise WrongRegion(f"{region[:40]!r} is no region: write one like eu-west-1")
    return region


def request_head(method: str, target: str, headers: dict[str, str], body_bytes: int) -> bytes:
    """The head of an HTTP/1.1 request."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if method == "PUT" or body_bytes:
        fields += f"content-length: {body_bytes}\r\n"
    return f"{method} {target} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")
