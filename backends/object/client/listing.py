"""ListObjectsV2: the query, and its answer read a little at a time.

A listing of a million objects is read beside a serving engine. boto3 holds Python's lock for 44 ms
on a page of a thousand objects. This reads a few objects, hands them out and reads on, and keeps
nothing that Python's garbage collector would have to visit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_plus
from xml.parsers import expat

from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.store import OBJECT_BYTES_MAX

PAGE_OBJECTS_MAX = 1000
_PIECE_BYTES = 4096


class Listed(NamedTuple):
    key: str
    """As the store wrote it: see `name_below`."""
    size: int
    modified_s: float


def list_query(prefix: str, after: str, token: str) -> str:
    """The query of one page, in the order in which it is signed."""
    found = {
        "continuation-token": token,
        "encoding-type": "url",
        "list-type": "2",
        "max-keys": str(PAGE_OBJECTS_MAX),
        "prefix": prefix,
        "start-after": "" if token else after,
    }
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in found.items() if value)


def name_below(prefix: str, key: str) -> str | None:
    """What stands behind the prefix in a listed key; None if it begins with something else.

    Stores write the prefix in three ways: a space is %20 or +, and some encode nothing. Behind it
    names have no character that would be encoded.
    """
    decodings: tuple[Callable[[str], str], ...] = (unquote, unquote_plus, str)
    for decode in decodings:
        if (decoded := decode(key)).startswith(prefix):
            return decoded[len(prefix) :]
    return None


class Page:
    """The objects of a page, read while they are asked for; afterwards the next page's token.

    Raises WrongEndpoint on anything that no S3 store would answer.
    """

    def __init__(self, body: bytes) -> None:
        self.token = ""
        """Of the next page; empty at the end."""
        self._body = body
        self._listed: list[Listed] = []
        self._depth = 0
        self._text: list[str] = []
        self._fields: dict[str, str] = {}
        """Of the object that is being read."""
        self._facts: dict[str, str] = {}
        """Of the page."""

    def __iter__(self) -> Iterator[Listed]:
        parser = expat.ParserCreate()  # stores that state a namespace state it as the default
        parser.StartDoctypeDeclHandler = _refuse_declarations
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text.append
        for start in range(0, len(self._body) + 1, _PIECE_BYTES):
            piece = self._body[start : start + _PIECE_BYTES]
            try:
                parser.Parse(piece, start + _PIECE_BYTES > len(self._body))
            except (expat.ExpatError, ValueError, LookupError, OverflowError) as error:
                raise WrongEndpoint(
                    "a listing that cannot be read: is it an S3 endpoint?"
                ) from error
            found, self._listed = self._listed, []
            yield from found
        if self._facts.get("IsTruncated", "").lower() == "true":
            self.token = self._facts.get("NextContinuationToken", "")
            if not self.token:  # what is behind it would be taken for gone
                raise WrongEndpoint(
                    "the endpoint lists more objects but does not say how to go on: does it know "
                    "ListObjectsV2?"
                )

    def _begin(self, tag: str, _: object) -> None:
        self._depth += 1
        self._text.clear()
        if self._depth == 1 and tag != "ListBucketResult":
            raise WrongEndpoint("the endpoint does not list as an S3 store would: check it")

    def _end(self, tag: str) -> None:
        if self._depth == 3:
            self._fields[tag] = "".join(self._text)
        elif self._depth == 2:
            if tag == "Contents":
                self._listed.append(_listed(self._fields))
            else:
                self._facts[tag] = "".join(self._text)
            self._fields.clear()
        self._depth -= 1


def _listed(fields: dict[str, str]) -> Listed:
    size = int(fields["Size"])
    if not 0 <= size <= OBJECT_BYTES_MAX:
        raise ValueError(f"no size: {size}")
    modified = datetime.fromisoformat(fields["LastModified"])
    if modified.tzinfo is None:  # it is no time of this machine's
        modified = modified.replace(tzinfo=UTC)
    return Listed(fields["Key"], size, modified.timestamp())


def _refuse_declarations(*_: object) -> None:
    raise WrongEndpoint("a listing with declarations of its own: is it an S3 endpoint?")
