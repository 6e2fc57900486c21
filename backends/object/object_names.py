"""The names of all objects below a namespace. They follow from the content.

    <namespace>/namespace.json               what the bytes mean, readable
    <namespace>/blocks/ab/cd/<key>-<gen>     one record; ab and cd are the key's first bytes
    <namespace>/manifest/<writer>-<number>   what a writer added and removed
    <namespace>/uses/<writer>-<number>       how often its requests used blocks

The generation of a block is 0, except while the same writer deletes an earlier object of the same
key: a late delete must not hit the new object.
"""

from __future__ import annotations

import re

from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, BlockKey

GENERATION_MAX = 0xFFFF
ObjectKey = tuple[BlockKey, int]
"""Key and generation of a block: what the name of its object is made of."""
NAMESPACE_CHARS = 32

_BLOCK = re.compile(
    r"([0-9a-f]{32})/blocks/([0-9a-f]{2})/([0-9a-f]{2})/"
    rf"((?:[0-9a-f]{{2}}){{{GROUP_BYTES + 1},{KEY_BYTES_MAX}}})-(0|[1-9][0-9]{{0,4}})"
)
_MANIFEST = re.compile(r"([0-9a-f]{32})/manifest/([0-9a-f]{16}-[0-9]{10})")
_USES = re.compile(r"([0-9a-f]{32})/uses/([0-9a-f]{16}-[0-9]{10})")
_DESCRIBES = re.compile(
    r"claims/([0-9a-f]{32})-.+"
    r"|([0-9a-f]{32})/(?:namespace\.json|(?:manifest|uses)/[0-9a-f]{16}-[0-9]{10})"
)


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
    found = _MANIFEST.fullmatch(name)
    return found.group(2) if found else None


def uses_prefix(namespace: str) -> str:
    return f"{namespace}/uses/"


def parse_uses(name: str) -> str | None:
    """Writer and number of a list of uses, None for any other name."""
    found = _USES.fullmatch(name)
    return found.group(2) if found else None


def description_name(namespace: str) -> str:
    return f"{namespace}/namespace.json"


def described_namespace(name: str) -> str | None:
    """The namespace of an object that describes it: its description, a manifest, a list of uses or
    a claim. None for blocks and any other name."""
    found = _DESCRIBES.fullmatch(name)
    return (found[1] or found[2]) if found else None
