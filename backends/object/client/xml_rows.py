"""S3's XML: a document of rows of fields, parsed a little at a time.

<Root><Fact>text</Fact><Row><Field>text</Field>...</Row><Row>...</Row></Root>
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar
from xml.parsers import expat

from kvtier.backends.object.stores.errors import WrongEndpoint

_PIECE_BYTES = 4096
_Row = TypeVar("_Row")


class RowParser(Generic[_Row]):
    """Makes a value of each row while the caller iterates. `facts` is complete afterwards.

    Raises WrongEndpoint on any other document, and on one with declarations of its own, which could
    expand without limit.
    """

    def __init__(self, root: str, row: str, make: Callable[[Mapping[str, str]], _Row]) -> None:
        self.facts: dict[str, str] = {}
        """Texts of other elements below the root."""
        self._root = root
        self._row = row
        self._make = make
        self._parsed: list[_Row] = []
        self._depth = 0
        self._text: list[str] = []
        self._fields: dict[str, str] = {}

    def rows(self, body: bytes) -> Iterator[_Row]:
        parser = expat.ParserCreate()  # an XML namespace is always stated as the default
        parser.StartDoctypeDeclHandler = _refuse_declarations
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text.append
        for start in range(0, len(body) + 1, _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            try:
                parser.Parse(piece, start + _PIECE_BYTES > len(body))
            except (expat.ExpatError, ValueError, LookupError, OverflowError) as error:
                raise WrongEndpoint(
                    f"a {self._root} that cannot be read: is it an S3 endpoint?"
                ) from error
            found, self._parsed = self._parsed, []
            yield from found

    def _begin(self, tag: str, _: object) -> None:
        self._depth += 1
        self._text.clear()
        if self._depth == 1 and tag != self._root:
            raise WrongEndpoint("the endpoint does not answer as an S3 store would: check it")

    def _end(self, tag: str) -> None:
        if self._depth == 3:
            self._fields[tag] = "".join(self._text)
        elif self._depth == 2:
            if tag == self._row:
                self._parsed.append(self._make(self._fields))
            else:
                self.facts[tag] = "".join(self._text)
            self._fields.clear()
        self._depth -= 1


def _refuse_declarations(*_: object) -> None:
    raise WrongEndpoint("an answer with declarations of its own: is it an S3 endpoint?")
