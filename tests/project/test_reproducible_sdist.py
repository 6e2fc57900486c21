"""The same files make the same archive, whoever packs them, whenever, in whatever order."""

from __future__ import annotations

import io
import tarfile

from tools.reproducible_sdist import pack_again

FILES = {"kvtier-1/kvtier/core.py": b"core", "kvtier-1/PKG-INFO": b"facts"}


def packed(names: list[str], *, mtime: float, owner: str, mode: int) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", format=tarfile.PAX_FORMAT) as file:
        for name in ["kvtier-1", "kvtier-1/kvtier", *names]:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.mode = mtime, owner, mode
            member.size = len(FILES.get(name, b""))
            member.type = tarfile.REGTYPE if name in FILES else tarfile.DIRTYPE
            file.addfile(member, io.BytesIO(FILES.get(name, b"")))
    return archive.getvalue()


def test_what_differs_from_build_to_build_is_left_out() -> None:
    first = packed([*FILES], mtime=1.5, owner="one", mode=0o664)
    second = packed([*reversed(FILES)], mtime=2e9, owner="two", mode=0o600)
    again = pack_again(first, 1_700_000_000)
    assert first != second
    assert again == pack_again(second, 1_700_000_000)
    with tarfile.open(fileobj=io.BytesIO(again)) as file:
        found = {each.name: file.extractfile(each) for each in file.getmembers() if each.isfile()}
        assert {name: content and content.read() for name, content in found.items()} == FILES
        assert {each.mtime for each in file.getmembers()} == {1_700_000_000}
