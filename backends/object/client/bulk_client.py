"""Deleting by the thousand, and the endpoint: by botocore's client, over our own connections.

botocore knows how to build and parse these requests; a `before-send` hook takes them out of its
hands before they reach its own sockets, which have no total deadline.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtier.backends.object.client.credentials import UNSIGNED, Signer, unobtainable, vendor
from kvtier.backends.object.client.status_errors import MISSING_CODES, explain_answer
from kvtier.backends.object.stores.errors import RateLimited, StoreError, WrongEndpoint

Send = Callable[[str, str, dict[str, str], bytes, float], tuple[int, dict[str, str], bytes]]
"""Method, url, headers, body and deadline of a signed request; status, headers and body back.
Raises StoreError for every answer that is not a success: botocore would follow redirects."""

DELETES_MAX = 1000
"""So many keys may stand in one request."""
_NOBODY = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}
"""For a client that is only asked where the store is."""


class BulkClient:
    """botocore's client for one bucket. Thread-safe; rebuilt when there are other credentials: it
    is given those that are valid now, because it would wait for others without end."""

    def __init__(self, signer: Signer, endpoint: str | None, bucket: str, send: Send) -> None:
        self._signer = signer
        self._endpoint = endpoint
        self.style = "path"
        """How its requests name the bucket, which may depend on the endpoint."""
        self._bucket = bucket
        self._send = send
        self._call = threading.local()
        self._errors = vendor("botocore.exceptions")
        self._parser_error = vendor("botocore.parsers").ResponseParserError
        self._awsrequest = vendor("botocore.awsrequest")
        self._lock = threading.Lock()
        self._made: Any = None
        self._made_with: Any = None

    @property
    def endpoint(self) -> str:
        """The endpoint that botocore found: from the settings, environment, profile or region."""
        return self._endpoint or str(self._new_client(**_NOBODY).meta.endpoint_url)

    def delete(self, keys: Sequence[str], deadline: float) -> Mapping[str, StoreError]:
        """Delete by the thousand; the keys that the store would not delete, and why."""
        failed: dict[str, StoreError] = {}
        for start in range(0, len(keys), DELETES_MAX):
            batch = keys[start : start + DELETES_MAX]
            objects = [{"Key": key} for key in batch]
            asked = {"Objects": objects, "Quiet": True}
            answer = self._ask("delete_objects", deadline, Delete=asked)
            for entry in answer.get("Errors", []):
                code = str(entry.get("Code", ""))
                if code in MISSING_CODES:
                    continue
                error = explain_answer(403, code, {}, f"bucket {self._bucket}")
                key = entry.get("Key")
                busy = isinstance(error, RateLimited) or code == "ServiceUnavailable"
                # nobody knows which are deleted, or it is no matter of this one
                if key not in batch or busy:
                    raise error
                failed[key] = error
        return failed

    def _ask(self, operation: str, deadline: float, **arguments: Any) -> Any:
        client = self._client(self._signer.credentials(deadline))
        self._call.deadline = deadline
        try:
            return getattr(client, operation)(Bucket=self._bucket, **arguments)
        except self._errors.ClientError as error:
            # an answer with status 200 that tells of an error in its body
            code = str(error.response.get("Error", {}).get("Code", ""))
            raise explain_answer(500, code, {}, f"bucket {self._bucket}") from None
        except (self._errors.BotoCoreError, self._parser_error) as error:
            raise WrongEndpoint(
                f"bucket {self._bucket} does not answer as an S3 store would "
                f"({type(error).__name__}): check the endpoint"
            ) from None
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the client signs, by what it was given
            raise unobtainable(error) from None

    def _client(self, credentials: Any) -> Any:
        with self._lock:  # a session must not make two clients at once
            if self._made is None or self._made_with != credentials:
                self._made = self._new_client(
                    aws_access_key_id=credentials.access_key,
                    aws_secret_access_key=credentials.secret_key,
                    aws_session_token=credentials.token,
                )
                self._made_with = credentials
            return self._made

    def _new_client(self, **credentials: str | None) -> Any:
        """A client with these credentials, so that botocore looks for none."""
        config = vendor("botocore.config").Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # a profile may ask for another endpoint, to which nothing else goes
            s3={"addressing_style": self.style, "use_accelerate_endpoint": False, **UNSIGNED},
        )
        try:
            # botocore's own, which boto3 wraps: a second wrapper around one session is an error
            made = self._signer.session.create_client(
                "s3",
                region_name=self._signer.region,
                endpoint_url=self._endpoint,
                config=config,
                **credentials,
            )
        except Exception as error:  # noqa: BLE001 - files and variables of the user's
            raise WrongEndpoint(
                f"no client can be made for bucket {self._bucket} ({type(error).__name__}): check "
                "region and endpoint, AWS_ENDPOINT_URL and the AWS config file"
            ) from None
        made.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        made.meta.events.register("before-send.s3", self._before_send)
        return made

    def _before_send(self, request: Any, **_: Any) -> Any:
        """What botocore would do with its own connections, done with ours."""
        headers = {name: _text(value) for name, value in request.headers.items()}
        status, answered, body = self._send(
            request.method, request.url, headers, request.body or b"", self._call.deadline
        )
        return self._awsrequest.AWSResponse(request.url, status, answered, _Body(body))


def _add_md5(request: Any, **_: Any) -> None:
    """For stores that insist on what botocore has left for newer checksums."""
    digest = hashlib.md5(request.body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


class _Body:
    """The raw body that botocore expects of a connection."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self._content


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
