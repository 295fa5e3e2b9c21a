"""Who gets an adapter when, and which one goes for it."""

import random

import pytest

from tandem.errors import ConfigError
from worker.decisions.adapter_slots import AdapterSlots


def load(slots: AdapterSlots, digest: str, num_bytes: int = 1) -> tuple[int, ...] | None:
    """Load what is first in line; what was evicted for it, or None where there is no room."""
    assert slots.next_load() == digest
    place = slots.place(digest, num_bytes)
    if place is None:
        return None
    slots.loaded()
    return place.evicted


def test_adapter_slots_load_is_joined() -> None:
    slots = AdapterSlots(capacity_bytes=8, num_slots=2)
    assert [slots.hold(ticket, "a") for ticket in (1, 2)] == [None, None]
    assert slots.hold(3, "b") is None
    assert load(slots, "a") == ()
    granted = dict(slots.grants())
    assert granted == {1: granted[1], 2: granted[1]}
    assert slots.hold(4, "a") == granted[1]
    assert (slots.num_waiting, slots.next_load(), slots.residents) == (1, "b", ("a",))


def test_adapter_slots_evict_the_least_recently_used_that_nobody_holds() -> None:
    slots = AdapterSlots(capacity_bytes=100, num_slots=3)
    held = {}
    for ticket, digest in enumerate("abc"):
        slots.hold(ticket, digest)
        load(slots, digest)
        (held[digest],) = (slot for _, slot in slots.grants())
    slots.release(held["b"])
    slots.release(held["c"])
    assert slots.hold(8, "b") == held["b"]
    slots.release(held["b"])  # now c is the oldest, and a is held
    slots.hold(9, "d")
    assert load(slots, "d") == (held["c"],)
    assert slots.residents == ("a", "b", "d")


def test_adapter_slots_bytes_evict_several() -> None:
    slots = AdapterSlots(capacity_bytes=10, num_slots=8)
    for ticket, digest in enumerate("abc"):
        slots.hold(ticket, digest)
        load(slots, digest, 3)
        for _, slot in slots.grants():
            slots.release(slot)
    slots.hold(9, "d")
    assert len(load(slots, "d", 6) or ()) == 2
    assert slots.residents == ("c", "d")
    with pytest.raises(ConfigError, match=r"it takes 11 bytes, engine.adapter_bytes leaves 10 to all"):
        slots.place("e", 11)


def test_adapter_slots_first_in_line_is_overtaken_a_bounded_number_of_times() -> None:
    slots = AdapterSlots(capacity_bytes=1, num_slots=1)
    slots.hold(0, "a")
    load(slots, "a")
    ((_, slot),) = slots.grants()
    slots.hold(1, "b")
    assert load(slots, "b") is None
    for ticket in range(AdapterSlots.MOST_OVERTAKES):
        assert slots.hold(100 + ticket, "a") == slot
    assert slots.hold(2, "a") is None
    for _ in range(AdapterSlots.MOST_OVERTAKES + 1):
        assert slots.place("b", 1) is None
        slots.release(slot)
    assert load(slots, "b") == (slot,)
    assert [ticket for ticket, _ in slots.grants()] == [1]
    slots.release(slot)
    assert load(slots, "a") == (slot,)
    assert [ticket for ticket, _ in slots.grants()] == [2]


def test_adapter_slots_only_those_that_make_room_are_closed() -> None:
    slots = AdapterSlots(capacity_bytes=3, num_slots=3)
    held = {}
    for ticket, digest in enumerate("abc"):
        slots.hold(ticket, digest)
        load(slots, digest)
        ((_, held[digest]),) = slots.grants()
    for ticket in (5, 6):
        slots.hold(ticket, "a")
    slots.hold(7, "c")
    slots.hold(8, "d")
    assert load(slots, "d") is None  # b has the fewest holds
    for ticket in range(100, 100 + 2 * AdapterSlots.MOST_OVERTAKES):
        assert slots.hold(ticket, "a") == held["a"]
        assert (slots.hold(1000 + ticket, "b") is None) == (ticket >= 100 + AdapterSlots.MOST_OVERTAKES)
    for _ in range(AdapterSlots.MOST_OVERTAKES + 1):
        slots.release(held["b"])
    assert load(slots, "d") == (held["b"],)


def test_adapter_slots_withdrawn_is_not_wanted() -> None:
    slots = AdapterSlots(capacity_bytes=1, num_slots=1)
    slots.hold(1, "a")
    slots.hold(2, "b")
    slots.withdraw(1)
    slots.withdraw(77)
    assert (slots.is_wanted("a"), slots.next_load()) == (False, "b")


def test_adapter_slots_give_up_frees_the_room() -> None:
    slots = AdapterSlots(capacity_bytes=4, num_slots=1)
    slots.hold(1, "a")
    slots.hold(2, "a")
    assert slots.place("a", 4) is not None
    assert slots.give_up("a") == (1, 2)
    slots.hold(3, "b")
    assert load(slots, "b", 4) == ()


@pytest.mark.parametrize("seed", range(20))
def test_adapter_slots_random_uses_stay_within_bounds(seed: int) -> None:
    """Never more bytes or slots than there are; no held adapter moves; everybody is served in the end."""
    rng = random.Random(seed)
    sizes = {f"a{number}": rng.randint(1, 6) for number in range(12)}
    slots = AdapterSlots(capacity_bytes=rng.randint(6, 20), num_slots=rng.randint(1, 5))
    held: list[tuple[str, int]] = []
    wanted: dict[int, str] = {}
    inside: dict[int, str] = {}
    for ticket in range(600):
        if held and (ticket >= 400 or rng.random() < 0.5):
            digest, slot = held.pop(rng.randrange(len(held)))
            assert inside[slot] == digest
            slots.release(slot)
        if ticket < 400:
            digest = rng.choice(list(sizes))
            if (slot_ := slots.hold(ticket, digest)) is None:
                wanted[ticket] = digest
            else:
                held.append((digest, slot_))
        while (first := slots.next_load()) is not None and (place := slots.place(first, sizes[first])) is not None:
            assert not {slot for _, slot in held} & {place.slot, *place.evicted}
            for slot in place.evicted:
                del inside[slot]
            inside[place.slot] = first
            slots.loaded()
            assert sum(sizes[one] for one in inside.values()) <= slots.capacity_bytes
            held.extend((wanted.pop(done), slot) for done, slot in slots.grants())
        assert sorted(inside.values()) == sorted(slots.residents)
    while held:
        slots.release(held.pop()[1])
        while (first := slots.next_load()) is not None and slots.place(first, sizes[first]) is not None:
            slots.loaded()
            held.extend((wanted.pop(done), slot) for done, slot in slots.grants())
    assert not wanted
    assert not slots.num_waiting
