"""What an inspector promises: it finds what a tier has committed, and changes only what it is asked
to change. What a kind cannot do is said in a typed error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.inspection import Block, Depth, Inspector, InspectorContext, Proof
from kvtier.core.records.record import record_bytes
from kvtier.errors import Unsupported
from kvtier.testing.records import NAMESPACE, blank, make_keys, prove
from kvtier.testing.subject import Rig, Subject
from kvtier.types import BlockKey

BLOCKS = 8


class InspectionContract:
    """The `Inspector`, beside a tier that is open and after it was closed."""

    subject: Subject

    @pytest.fixture
    def kept(self, rig: Rig) -> list[BlockKey]:
        """Blocks that are committed, of a tier that is open."""
        keys = rig.put(make_keys(5))
        assert keys
        rig.settle()
        return keys

    def test_before_the_medium_is_made_nothing_is_there(self, tmp_path: Path) -> None:
        size = record_bytes(NAMESPACE.payload_bytes)
        settings = self.subject.settings(tmp_path, BLOCKS, size)
        found = self.subject.backend.open_inspector(settings, InspectorContext(tier=1)).look()
        assert found.parts == []
        assert list(tmp_path.iterdir()) == []

    def test_a_look_finds_what_is_committed(self, rig: Rig, kept: list[BlockKey]) -> None:
        inspector = opened(rig)
        if sees(inspector):
            (part,) = inspector.contents.parts
            assert (part.kind, part.namespace) == (rig.backend.kind, NAMESPACE.id)
            assert part.blocks == len(kept)
            assert part.bytes <= inspector.contents.used
            assert part.newest is not None
            assert not inspector.contents.troubles
            assert sorted(block.key for block in inspector.blocks()) == sorted(kept)
            names = opened(rig)
            names.look(Depth.NAMES)
            assert [each.namespace for each in names.contents.parts] == [NAMESPACE.id]

    def test_blocks_are_listed_by_namespace_and_by_key(
        self, rig: Rig, kept: list[BlockKey]
    ) -> None:
        inspector = opened(rig)
        if sees(inspector):
            assert list(inspector.blocks("f" * 32)) == []
            digits = kept[0].hex()[:12]
            found = {block.key for block in inspector.blocks(NAMESPACE.id[:6], [digits])}
            assert kept[0] in found

    def test_looking_changes_nothing(self, rig: Rig, kept: list[BlockKey]) -> None:
        def files() -> dict[str, tuple[int, int]]:
            found = (path for path in rig.folder.rglob("*") if path.is_file())
            status = {str(path): path.lstat() for path in found}
            return {name: (each.st_mtime_ns, each.st_size) for name, each in status.items()}

        rig.close()
        before = files()
        inspector = opened(rig)
        if sees(inspector):
            list(inspector.blocks())
            assert proofs(inspector) == {Proof.GOOD}
            supported(lambda: list(inspector.garbage(None)))
            list(inspector.checks())
        assert files() == before
        rig.open()

    def test_every_record_is_proved(self, rig: Rig, kept: list[BlockKey]) -> None:
        """While its engine runs, too."""
        inspector = opened(rig)
        if sees(inspector):
            assert proofs(inspector) == {Proof.GOOD}

    def test_damage_is_found_and_taken_out_of_use(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        if sees(inspector) and damage(self.subject.block_files(rig.folder)):
            bad = [block for block, proof in proved(inspector) if proof is Proof.BAD]
            assert bad
            homes = {inspector.home_of(block) for block in bad}
            for home in homes:
                some = [block for block in bad if inspector.home_of(block) == home]
                taken = supported(partial(inspector.quarantine, some))
                assert taken in (None, len(some))
            if taken is not None:
                inspector.look()
                left = [block for block in inspector.blocks() if not block.quarantined]
                assert not {block.key for block in left} & {block.key for block in bad}
        rig.open()
        rig.get(kept)  # none of them is served wrong

    def test_what_is_tidy_has_no_garbage(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        if sees(inspector):
            assert supported(lambda: list(inspector.garbage(None))) in ([], None)
        rig.open()

    def test_what_is_cleared_is_gone(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        cleared = None
        if sees(inspector):
            (part,) = inspector.contents.parts
            cleared = supported(lambda: list(inspector.clear(part)))
        if cleared is not None:
            assert [each.kept for each in cleared] == [""]
            assert sum(each.blocks for each in cleared) == len(kept)
            assert not sum(part.blocks for part in inspector.look().parts)
        rig.open()
        if cleared is not None:
            assert rig.resident(kept) == []

    def test_a_copy_reads_what_is_there(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        inspector.look(Depth.RECORDED)
        found: dict[BlockKey, bool] = {}
        for source in [] if inspector.contents.unseen else inspector.sources(NAMESPACE.id):
            source.open(NAMESPACE)
            for row in source.rows():
                key = BlockKey(row["key"].tobytes()[: row["key_bytes"]])
                buffer = blank()
                (outcome,) = source.read([int(row["at"])], [key], [buffer])
                found[key] = outcome.ok and prove(buffer, key).ok
            source.close()
        assert found in ({}, dict.fromkeys(kept, True))
        assert inspector.contents.unseen or found
        rig.open()

    def test_a_copy_fills_it(self, rig: Rig) -> None:
        rig.close()
        filling = opened(rig).filling()
        keys = make_keys(3)
        if filling.keeps() and self.subject.persistent:
            with filling.alone():
                filling.check(NAMESPACE)
                rig.tier, rig.handler = filling.open(NAMESPACE)
                stored = rig.put(keys)
                rig.settle()
                filling.carry_uses(rig.tier, NAMESPACE, {keys[0]: (3, 1.0)})
                rig.close()
            assert stored == keys
            written = filling.audit(NAMESPACE)
            if written is not None:
                written.add(keys)
                assert written.missing() == 0
            inspector = opened(rig)
            if sees(inspector):
                assert {block.key for block in inspector.blocks()} == set(keys)
        rig.open()

    def test_what_is_measured_lies_elsewhere(self, rig: Rig, kept: list[BlockKey]) -> None:
        inspector = opened(rig)
        place = supported(lambda: inspector.measuring_place(1 << 20))
        if place is not None:
            with place as settings:
                own, other = (rig.backend.identity(each) for each in (rig.settings, settings))
                assert own != other or rig.backend.host  # which carries the name of an engine
        assert rig.get(kept) == kept


def opened(rig: Rig) -> Inspector[Any]:
    """The inspector of a rig's tier, as that of the first tier of a stack that can be it."""
    context = InspectorContext(tier=0 if rig.backend.host else 1, engine=rig.context.engine)
    return rig.backend.open_inspector(rig.settings, context)


def sees(inspector: Inspector[Any]) -> bool:
    """Look, and say whether this kind can be looked at."""
    return not inspector.look().unseen


def supported(call: Callable[[], Any]) -> Any:
    """What it answers; None if the kind says that it cannot do that."""
    with suppress(Unsupported):
        return call()
    return None


def proved(inspector: Inspector[Any]) -> Iterator[tuple[Block, Proof]]:
    """Every block that is listed, with what its record is worth."""
    prover = inspector.prover(inspector.contents.namespaces)
    try:
        for block in list(inspector.blocks()):
            yield block, prover.prove(block).proof
    finally:
        prover.close()


def proofs(inspector: Inspector[Any]) -> set[Proof]:
    """What all records are worth."""
    return {proof for _, proof in proved(inspector)}


def damage(files: list[Path]) -> bool:
    """Flip a bit in the middle of each; whether there is any."""
    for path in files:
        with path.open("r+b") as file:
            at = os.fstat(file.fileno()).st_size // 2
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    return bool(files)
