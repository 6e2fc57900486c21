"""The names of all objects below a url. They follow from the content.

    caretaker/<term>                         who keeps the budget, and what it reports
    servers/<namespace>-<server>-<writer>-<capacity>-<block bytes>    a server that lives
    <namespace>/namespace.json               what the bytes mean, readable
    <namespace>/blocks/ab/cd/<key>-<gen>     one record; ab and cd are the key's first bytes
    <namespace>/manifest/<writer>-<number>   what a server added and removed, or what a caretaker
                                             says that all did: then its term is the writer
    <namespace>/uses/<writer>-<number>       how often its requests used blocks
    <namespace>/retained/<writer>            which blocks it retains

The generation of a block is 0, except where an earlier object of the same key was removed lately:
a late delete must not hit the new object.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, BlockKey

GENERATION_MAX = 0xFFFF
ObjectKey = tuple[BlockKey, int]
"""Key and generation of a block: what the name of its object is made of."""
NAMESPACE_CHARS = 32
TERMS = "caretaker/"
SERVERS = "servers/"
OLD_CLAIMS = "claims/"
"""Claims of the first alpha: nobody reads them any more."""

_BLOCK = re.compile(
    r"([0-9a-f]{32})/blocks/([0-9a-f]{2})/([0-9a-f]{2})/"
    rf"((?:[0-9a-f]{{2}}){{{GROUP_BYTES + 1},{KEY_BYTES_MAX}}})-(0|[1-9][0-9]{{0,4}})"
)
_LIST = re.compile(r"([0-9a-f]{32})/(manifest|uses)/([0-9a-f]{16}-[0-9]{10})")
_TERM = re.compile(r"caretaker/([0-9]{10})")
_SERVER = re.compile(
    r"servers/([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9]{1,19})-([0-9]{1,19})"
)
_DESCRIBES = re.compile(
    r"(?:servers|claims)/([0-9a-f]{32})-.+"
    r"|([0-9a-f]{32})/(?:namespace\.json|retained/[0-9a-f]{16}"
    r"|(?:manifest|uses)/[0-9a-f]{16}-[0-9]{10})"
)


class ServerName(msgspec.Struct, frozen=True):
    """What the name of a server's object says."""

    namespace: str
    server: str
    """See `writer_ids`."""
    writer: str
    """Of its manifests."""
    capacity: int
    block_bytes: int

    def __str__(self) -> str:
        who = f"{self.namespace}-{self.server}-{self.writer}"
        return f"{SERVERS}{who}-{self.capacity}-{self.block_bytes}"


def block_name(namespace: str, key: BlockKey, generation: int = 0) -> str:
    """The name of a block's object."""
    text = key.hex()
    return f"{namespace}/blocks/{text[:2]}/{text[2:4]}/{text}-{generation}"


def blocks_prefix(namespace: str, digits: str = "") -> str:
    """The prefix of all blocks whose keys begin with these digits: at least four, or none."""
    return f"{namespace}/blocks/" + (digits and f"{digits[:2]}/{digits[2:4]}/{digits}")


def parse_block(name: str) -> tuple[str, BlockKey, int] | None:
    """Namespace, key and generation of a block's object, None for any other name."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        return None
    namespace, first, second, text, generation = found.groups()
    if not text.startswith(first + second) or int(generation) > GENERATION_MAX:
        return None
    return namespace, BlockKey(bytes.fromhex(text)), int(generation)


def manifest_prefix(namespace: str) -> str:
    return f"{namespace}/manifest/"


def parse_manifest(name: str) -> str | None:
    """Writer and number of a manifest, None for any other name."""
    found = _LIST.fullmatch(name)
    return found[3] if found and found[2] == "manifest" else None


def new_writer() -> str:
    """A server as the writer of manifests, at random."""
    return f"{secrets.randbits(63) | 1 << 63:016x}"


def caretaker_writer(term: int) -> str:
    """The caretaker of a term as the writer of manifests."""
    return f"{term:016x}"


def is_of_caretaker(manifest: str) -> bool:
    """Whether a caretaker wrote a manifest of this name."""
    return manifest < "8"


def uses_prefix(namespace: str) -> str:
    return f"{namespace}/uses/"


def parse_uses(name: str) -> str | None:
    """Writer and number of a list of uses, None for any other name."""
    found = _LIST.fullmatch(name)
    return found[3] if found and found[2] == "uses" else None


def retained_prefix(namespace: str) -> str:
    return f"{namespace}/retained/"


def description_name(namespace: str) -> str:
    return f"{namespace}/namespace.json"


def term_name(term: int) -> str:
    return f"{TERMS}{term:010d}"


def parse_term(name: str) -> int | None:
    found = _TERM.fullmatch(name)
    return int(found[1]) if found else None


def parse_server(name: str) -> ServerName | None:
    """What the name of a server's object says, None for any other name."""
    found = _SERVER.fullmatch(name)
    return ServerName(found[1], found[2], found[3], int(found[4]), int(found[5])) if found else None


def described_namespace(name: str) -> str | None:
    """The namespace of an object that describes it: its description, a manifest, a list of uses or
    of retained blocks, a server. None for blocks and any other name."""
    found = _DESCRIBES.fullmatch(name)
    return (found[1] or found[2]) if found else None
