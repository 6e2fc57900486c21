"""What a handler owes its callers: threads of the mover, and buffers that are host memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.testing.handler_process import load_elsewhere
from kvtier.testing.records import LARGE, blank, make_keys, prove, sealed
from kvtier.testing.subject import Rig, Subject
from kvtier.types import Outcome

BLOCKS = 8


class TransferContract:
    """Calls of a handler, many at once and one after the other."""

    subject: Subject

    def test_transfers_run_in_many_threads(self, rig: Rig) -> None:
        keys = make_keys(BLOCKS)
        places = rig.reserve(keys).spec

        def store(place: int) -> list[Outcome]:
            record = sealed(keys[place])
            return rig.handler.store(places.select(place, place + 1), [keys[place]], [record])

        def load(index: int) -> Outcome:
            record, place = blank(), index % BLOCKS
            [outcome] = rig.handler.load(spec.select(place, place + 1), [keys[place]], [record])
            return prove(record, keys[place]) if outcome.ok else outcome

        with ThreadPoolExecutor(rig.handler.concurrency) as threads:
            assert list(threads.map(store, range(BLOCKS))) == [[Outcome.OK]] * BLOCKS
            rig.tier.complete_store(keys)
            spec = rig.tier.prepare_load(keys)
            assert set(threads.map(load, range(8 * BLOCKS))) == {Outcome.OK}
        rig.tier.complete_load(keys)

    def test_a_store_has_ended_when_it_says_so(self, rig: Rig) -> None:
        """Its buffers are host memory, which others read meanwhile, and write to afterwards."""
        keys = make_keys(BLOCKS)
        reservation = rig.reserve(keys)
        records = [sealed(key) for key in keys]
        rig.transfer(keys, reservation.spec, records, loading=False)
        assert records == [sealed(key) for key in keys], "a handler changes what it stores"
        for record in records:
            record[:] = bytes(len(record))
        rig.tier.complete_store(keys)
        assert rig.get(keys) == keys

    def test_a_large_record_comes_back_whole(self, tmp_path: Path) -> None:
        """As that of most models is: no socket takes or gives it in one piece."""
        rig = Rig(self.subject, tmp_path, blocks=2, namespace=LARGE)
        keys = make_keys(1)
        assert rig.put(keys) == rig.get(keys) == keys
        rig.close()

    def test_what_is_closed_holds_nothing(self, rig: Rig) -> None:
        held = []
        for start in range(0, 10 * BLOCKS, BLOCKS):
            rig.get(rig.put(make_keys(BLOCKS, start=start)))
            rig.close()
            held.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
            rig.open()
        # What is opened once for all later ones is open by the third round.
        assert held[-1][0] < held[2][0] + 4, f"files stay open: {held}"
        assert held[-1][1] < held[2][1] + 4, f"threads stay alive: {held}"

    def test_another_process_finds_the_medium(self, rig: Rig) -> None:
        """When an engine serves, handlers are opened in that of the mover."""
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(1))
        spec = rig.tier.prepare_load(keys)
        rig.handler.close()  # there is one at a time
        assert load_elsewhere(rig.settings, rig.context, spec, keys) == [Outcome.OK]
        rig.handler = self.subject.open_handler(rig.settings, rig.context, rig.disk)
        rig.tier.complete_load(keys)
