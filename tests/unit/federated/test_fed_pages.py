"""What is put into the block of memory comes out of it, and the block never takes more than its budget."""

from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.federated.state import PAGE, Pages, Stored


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAGE)), max_size=60), st.integers(0, 12_000))
def test_pages_are_a_dictionary_of_bytes_within_a_budget(steps: list[tuple[bool, int]], budget: int) -> None:
    pages, held = Pages(budget), list[tuple[Stored, bytes]]()
    for number, (free, length) in enumerate(steps):
        if free and held:
            stored, expected = held.pop(length % len(held))
            assert pages.get(stored) == expected
            pages.free(stored)
        else:
            data = bytes((number + i) % 256 for i in range(length))
            before = pages.used
            if pages.room_for(length):
                held.append((pages.put(data), data))
            else:
                try:
                    pages.put(data)
                except MemoryError:
                    assert pages.used == before
                else:
                    raise AssertionError("put without room")
        assert pages.used == sum(stored.cost for stored, _ in held) <= budget
        for stored, expected in held:
            assert pages.get(stored) == expected
