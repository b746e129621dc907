"""Samples on local disk: a disk that is full, a process that starts while another one writes."""

import resource

from thinwire.systems.data.levels import DiskStore


def test_a_sample_that_cannot_be_written_is_left_out_and_leaves_nothing(tmp_path):
    store = DiskStore(tmp_path)
    assert store.put(b"a", bytes(100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # EFBIG comes the way that ENOSPC comes
    try:
        assert not store.put(b"b", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.get(b"b") is None
    assert store.get(b"a") == bytes(100)
    assert not list((tmp_path / "partial").iterdir())


def test_a_partial_file_that_is_gone_when_it_is_looked_at_is_nobodys_error(tmp_path):
    DiskStore(tmp_path)
    (tmp_path / "partial" / "renamed").symlink_to("meanwhile")  # listed, and not there
    assert DiskStore(tmp_path).put(b"a", b"1")
