"""The arena: one value per key, a budget, and nothing torn, whatever is killed when."""

import ctypes
import mmap
import os
import random
import signal
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import fork, kill_after, kill_at_line, wait

from thinwire.systems.data.arena import FILLING, READY, SLOT, SLOTS_AT, Arena, Header, store, table_bytes
from thinwire.systems.data.keys import digest

FILES = ("arena.py",)


def value_of(number, size):
    return random.Random(number).randbytes(size)


def states(arena):
    return [SLOT.unpack_from(arena.table, SLOTS_AT + i * SLOT.size)[4] for i in range(arena.slots)]


@pytest.fixture
def opened(tmp_path):
    arenas = []

    def make(slots=64, room=1 << 22, name="a.arena"):
        arenas.append(Arena.open(tmp_path / name, slots, table_bytes(slots) + room))
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.close()


@settings(max_examples=30, deadline=None)
@given(
    puts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5000)), max_size=40),
    slots=st.integers(1, 40),
    room=st.integers(0, 60_000),
)
def test_it_is_a_dictionary_that_stops_growing(tmp_path_factory, puts, slots, room):
    path = tmp_path_factory.mktemp("arena") / "a.arena"
    arena = Arena.open(path, slots, table_bytes(slots) + room)
    expected, used = {}, 0
    for number, size in puts:
        key, space = digest(number), -(-size // 64) * 64
        outcome = arena.put(key, value_of(number, size))
        if number in expected:
            assert outcome is None
        elif len(expected) == slots or used + space > room:
            assert outcome is False
        else:
            assert outcome is True
            expected[number] = value_of(number, size)
            used += space
    for number in range(31):
        assert arena.get(digest(number)) == expected.get(number)
    assert arena.held() == len(expected)
    assert Header.read(arena.table).used <= arena.limit
    assert os.path.getsize(path) <= arena.limit + 4096
    arena.close()


def test_a_crowd_of_keys_is_refused_before_all_slots_are_read(opened):
    """Keys with one first slot: those stored are found, the rest are refused, though most of the table is empty."""
    arena = opened(slots=4096)
    keys = [struct.pack("<QQ", 4000, number) for number in range(1000)]
    stored = [arena.put(key, key) for key in keys]
    assert 100 < stored.count(True) < 500
    assert stored.index(False) == stored.count(True)
    assert [arena.get(key) for key in keys] == [key if kept else None for key, kept in zip(keys, stored)]


def test_a_kill_before_any_line_of_a_put(opened):
    """Every store boundary of a put, by a process that ends there with SIGKILL."""
    arena = opened(slots=256, room=8 << 20)
    codes, left_filling = [], 0
    for line in range(1, 400):
        key, value = digest(line), value_of(line, 10_000)
        codes.append(kill_at_line(lambda k=key, v=value: arena.put(k, v), line, FILES))
        found = arena.get(key)
        assert found in (None, value)
        left_filling += found is None and FILLING in states(arena)
        outcome = arena.put(key, value)
        assert outcome is (None if found else True)
        assert FILLING not in states(arena)  # the killed writer's slot was taken over, none is lost
        assert arena.get(key) == value
        if codes[-1] == 0:
            break
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert codes[-1] == 0
    assert len(codes) > 30
    assert left_filling >= 3
    for number in range(1, len(codes) + 1):
        assert arena.get(digest(number), always=True) == value_of(number, 10_000)


def test_a_store_shows_the_old_value_or_the_new_one(tmp_path):
    """To another process at any instant, and so also to who comes after a kill at that instant."""
    size = 4096
    file = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT)
    os.truncate(file, size)
    table = mmap.mmap(file, size)
    first, second = 0x1111111111111111, 0x2222222222222222
    store(table, 64, first, 8)

    def write():
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            for _ in range(1000):
                store(table, 64, second, 8)
                store(table, 64, first, 8)

    pid, seen = fork(write), set()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        seen.update(struct.unpack_from("<Q", table, 64)[0] for _ in range(1000))
    assert seen <= {first, second}, [hex(value) for value in seen]
    table.close()
    os.close(file)


def test_kills_at_random_times(opened):
    arena, times, kills = opened(slots=512, room=128 << 20), random.Random(0), 30
    for number in range(kills):
        key, value = digest(number), value_of(number, 200_000)
        kill_after(lambda k=key, v=value: arena.put(k, v), times.uniform(0, 0.0006))
        assert arena.get(key) in (None, value)
        arena.put(key, value)
    assert all(arena.get(digest(n), always=True) == value_of(n, 200_000) for n in range(kills))
    assert states(arena).count(READY) == kills
    assert FILLING not in states(arena)


def test_several_writers_store_each_value_once(opened):
    arena = opened(slots=100)

    def write():
        for number in range(50):
            arena.counters.add(admitted=arena.put(digest(number), value_of(number, 5000)) is True)

    children = [fork(write) for _ in range(4)]
    assert [wait(pid) for pid in children] == [0] * 4
    assert arena.counters.total().admitted == 50
    assert arena.held() == 50
    assert all(arena.get(digest(n)) == value_of(n, 5000) for n in range(50))


def test_threads_and_rows_of_ended_processes(opened):
    arena = opened(slots=300)
    for _ in range(3):
        assert wait(fork(lambda: arena.counters.add(refused=1))) == 0

    def write():
        for number in range(100):
            arena.counters.add(admitted=arena.put(digest(number), value_of(number, 900)) is True, reads_source=1)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = arena.counters.total()
    assert (total.admitted, total.reads_source, total.refused) == (100, 400, 3)


def test_a_damaged_value_is_not_served_and_written_again(opened, tmp_path):
    arena = opened()
    arena.put(b"k" * 16, b"good" * 100)
    offset = SLOT.unpack_from(arena.table, SLOTS_AT + int.from_bytes(b"k" * 8, "little") % 64 * SLOT.size)[1]
    with open(tmp_path / "a.arena", "r+b") as file:
        file.seek(offset)
        file.write(b"bad")
    assert arena.get(b"k" * 16) is None
    assert arena.put(b"k" * 16, b"good" * 100) is True
    assert arena.get(b"k" * 16) == b"good" * 100


def test_a_damaged_header_is_set_aside(tmp_path):
    path = tmp_path / "a.arena"
    path.write_bytes(b"nonsense" * 1000)
    with pytest.warns(UserWarning, match="is damaged"):
        arena = Arena.open(path, 16, 1 << 20)
    assert (tmp_path / "a.damaged").read_bytes()[:8] == b"nonsense"
    assert arena.put(b"k" * 16, b"v") is True
    arena.close()
    again = Arena.open(path, 16, 1 << 20)  # and what a process left is there for the next
    assert again.get(b"k" * 16) == b"v"
    again.close()


@pytest.mark.parametrize("end", ["arena", "lock"])
@pytest.mark.parametrize("leave", [os.mkfifo, lambda path: os.symlink("/dev/null", path)], ids=["pipe", "link"])
def test_what_others_leave_in_the_folder_is_refused(end, leave, tmp_path):
    leave(tmp_path / f"a.{end}")
    with pytest.raises(OSError, match=str(tmp_path / f"a.{end}")):
        Arena.open(tmp_path / "a.arena", 16, 1 << 20)


def test_what_others_leave_for_a_new_file_is_not_used(tmp_path):
    with open(tmp_path / "a.partial", "w") as theirs:
        arena = Arena.open(tmp_path / "a.arena", 16, 1 << 20)
        assert os.fstat(theirs.fileno()).st_ino != os.stat(arena.path).st_ino
    arena.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "missing")):
        Arena.open(tmp_path / "missing" / "a.arena", 16, 1 << 20)


NO_NAMESPACE = 77


def test_a_full_memory_file_system_ends_admission_not_the_process(tmp_path):
    def work():
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, new_user, private, recursive = 0x00020000, 0x10000000, 1 << 18, 1 << 14
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(new_mounts):
            if libc.unshare(new_mounts | new_user):
                return NO_NAMESPACE
            # Whoever has no number in the namespace may make no file in its tmpfs (EOVERFLOW).
            for name, text in [("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")]:
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        libc.mount(None, b"/", None, private | recursive, None)
        if libc.mount(b"tmpfs", str(tmp_path).encode(), b"tmpfs", 0, b"size=40m"):
            return NO_NAMESPACE
        arena = Arena.open(tmp_path / "a.arena", 128, 1 << 30)
        outcomes = [arena.put(digest(n), value_of(n, 1 << 20)) for n in range(60)]
        admitted = outcomes.count(True)
        assert outcomes == [True] * admitted + [False] * (60 - admitted)
        assert 16 <= admitted < 40
        with open(tmp_path / "other", "wb") as file, pytest.raises(OSError, match="No space"):
            file.write(bytes(40 << 20))
        assert all(arena.get(digest(n)) == value_of(n, 1 << 20) for n in range(admitted))
        assert arena.put(digest(99), bytes(1 << 20)) is False
        return 0

    code = wait(fork(work))
    if code == NO_NAMESPACE:
        pytest.skip("this system lets us mount no tmpfs of our own")
    assert code == 0
