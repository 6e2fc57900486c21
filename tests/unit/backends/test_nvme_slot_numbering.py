"""How the slots of slabs are numbered through: no number means two slots."""

from __future__ import annotations

from kvtier.slab.files import SlabFile
from kvtier.slab.layout import SLOT_BITS, SlabHeader
from kvtier.slab.numbering import Places, SlotPlace
from kvtier.testing.subject import NAMESPACE


def slab(number: int, slots: int) -> SlabFile:
    header = SlabHeader(
        slots=slots, slot_bytes=8192, data_at=0, slab_id=number, namespace=NAMESPACE.digest
    )
    return SlabFile(header, owner=1)


def idle(place: SlotPlace) -> bool:
    return False


def prove(places: Places) -> None:
    """Every number of a slab that is there leads to its slot, and to no other's."""
    numbered = [slot for place in places.by_slab.values() for slot in place.slots]
    assert len(set(numbered)) == len(numbered)
    assert all(slot < places.slots for slot in numbered)
    for number, place in places.by_slab.items():
        assert [places.of(slot) for slot in place.slots] == [place] * len(place.slots)
        there = [(number << SLOT_BITS) + index for index in range(place.slab.header.slots)]
        assert places.where(place.slots) == there


def test_a_range_is_given_to_what_fits_into_it() -> None:
    places = Places()
    lost = [places.add(slab(number, slots), idle) for number, slots in ((1, 4), (2, 8), (3, 2))]
    for place in lost[:2]:
        places.lose(place)
    assert places.add(slab(4, 9), idle).base == 14
    assert places.add(slab(5, 5), idle).base == 4
    assert places.add(slab(6, 3), idle).base == 0
    prove(places)
    assert places.add(slab(7, 1), idle).base == 23, "no range is given twice"
    places.lose(places.by_slab[6])
    assert places.add(slab(8, 4), idle).base == 0, "it is as long as it ever was"
    prove(places)
    assert sorted(places.by_slab) == [3, 4, 5, 7, 8]


def test_no_range_is_given_away_while_something_is_on_its_way() -> None:
    places = Places()
    places.lose(places.add(slab(1, 4), idle))
    places.lose(places.add(slab(2, 4), lambda place: True))
    assert places.slots == 8
    assert places.add(slab(3, 4), lambda place: place.base == 0).base == 4
    assert places.add(slab(4, 4), lambda place: True).base == 8
    assert places.add(slab(5, 4), idle).base == 0
    prove(places)


def test_more_slabs_than_any_engine_makes_can_be_numbered() -> None:
    """Others may have left them, however small."""
    places, count = Places(), (1 << 16) + 100
    for number in range(count):
        places.add(slab(number, 1), idle)
    assert places.where([count - 1]) == [count - 1 << SLOT_BITS]
    assert places.of(count - 1).slab.id == count - 1


def test_whether_all_is_ours() -> None:
    places = Places()
    one, two = (places.add(slab(number, 2), idle) for number in (1, 2))
    for _ in range(2):
        places.own(one, True)
    assert not places.all_mine
    places.own(two, True)
    assert places.all_mine
    places.lose(two)
    assert not two.mine
    three = places.add(slab(3, 2), idle)
    assert not places.all_mine
    places.own(three, True)
    assert places.all_mine
