"""ListObjectsV2: the query, and pages that are parsed a little at a time.

A million objects are listed beside a serving engine. boto3 holds the GIL for 44 ms to parse a
page of a thousand objects. This parser parses a few objects, yields them and goes on. It keeps
nothing that Python's garbage collector would have to visit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_plus

from kvtier.backends.object.client.xml_rows import RowParser
from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.store import OBJECT_BYTES_MAX

PAGE_OBJECTS_MAX = 1000


class ListedObject(NamedTuple):
    key: str
    """In the store's encoding: see `name_from_key`."""
    size: int
    modified_s: float


def list_query(prefix: str, after: str, token: str) -> str:
    """The query for one page, in the order in which it is signed."""
    found = {
        "continuation-token": token,
        "encoding-type": "url",
        "list-type": "2",
        "max-keys": str(PAGE_OBJECTS_MAX),
        "prefix": prefix,
        "start-after": "" if token else after,
    }
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in found.items() if value)


def name_from_key(prefix: str, key: str) -> str | None:
    """The part of a listed key after the prefix; None if the key begins with something else.

    Stores encode the prefix in three ways: a space is %20 or +, and some encode nothing. The rest
    of a name has no character that would be encoded.
    """
    decodings: tuple[Callable[[str], str], ...] = (unquote, unquote_plus, str)
    for decode in decodings:
        if (decoded := decode(key)).startswith(prefix):
            return decoded[len(prefix) :]
    return None


class Page:
    """The objects of a page, parsed while the caller iterates. Afterwards `token` is known.

    Iterating raises WrongEndpoint on anything that no S3 store would send.
    """

    def __init__(self, body: bytes) -> None:
        self.token = ""
        """Names the next page; empty if there is none."""
        self._body = body

    def __iter__(self) -> Iterator[ListedObject]:
        parser = RowParser("ListBucketResult", "Contents", _listed_object)
        yield from parser.rows(self._body)
        if parser.facts.get("IsTruncated", "").lower() == "true":
            self.token = parser.facts.get("NextContinuationToken", "")
            if not self.token:  # the rest would be taken for deleted
                raise WrongEndpoint(
                    "the endpoint lists more objects but does not say how to go on: does it know "
                    "ListObjectsV2?"
                )


def _listed_object(fields: Mapping[str, str]) -> ListedObject:
    size = int(fields["Size"])
    if not 0 <= size <= OBJECT_BYTES_MAX:
        raise ValueError(f"no size: {size}")
    modified = datetime.fromisoformat(fields["LastModified"])
    if modified.tzinfo is None:  # it is not in the time zone of this machine
        modified = modified.replace(tzinfo=UTC)
    return ListedObject(fields["Key"], size, modified.timestamp())
