"""CachedDataset: the same samples as without it, found again only while nothing changed, counted exactly."""

import math
import os
import pickle
import random
import time

import pytest
import torch
from cache_sources import Digits, Jpegs, bytes_for, cached, decode, same, scale, shift, write_jpeg
from processes import kill_after
from torch.utils.data import DataLoader

from spawned import fork
from thinwire.core.kernels.seeding import generator
from thinwire.systems.data import CacheStats
from thinwire.systems.data.keys import fingerprint_of


def plain(source, epoch, prefix=scale, seed=0):
    """What the pipeline without a cache gives."""
    return [shift(prefix(source[i]), generator(seed, epoch, i)) for i in range(len(source))]


def jpegs(tmp_path):
    (tmp_path / "images").mkdir()
    return Jpegs(tmp_path / "images")


def only(batch):
    return batch[0]


def test_it_gives_what_the_pipeline_without_it_gives(tmp_path):
    source = Digits()
    dataset = cached(source, directory=tmp_path)
    epochs = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        epochs.append([dataset[i] for i in range(len(dataset))])
        assert all(map(same, epochs[-1], plain(source, epoch)))
    assert not any(map(same, epochs[0], epochs[1]))
    assert same(dataset[-1], epochs[2][-1])
    with pytest.raises(IndexError):
        dataset[60]
    there = pickle.loads(pickle.dumps(dataset))  # in a worker that is not a fork
    assert same(there[-1], epochs[2][-1])
    there.close()
    dataset.close()
    with pytest.raises(ValueError, match="closed"):
        dataset[0]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_persistent_workers_share_the_arena_and_see_the_epoch(tmp_path, start):
    source = Digits(40)
    dataset = cached(source, directory=tmp_path)
    workers = 2 if start == "fork" else 1
    loader = DataLoader(
        dataset, num_workers=workers, persistent_workers=True, multiprocessing_context=start, collate_fn=only
    )
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert all(map(same, loader, plain(source, epoch)))
    total = dataset.stats()
    assert (total.reads_source, total.admitted, total.hits_memory, total.refused) == (40, 40, 80, 0)
    del loader
    assert all(map(same, [dataset[i] for i in range(40)], plain(source, 2)))  # what workers put, we hit
    assert (dataset.stats() - total) == CacheStats(hits_memory=40, bytes_memory=total.bytes_memory // 2)
    dataset.close()


@pytest.mark.parametrize("kept", [0, 15, 30, 60])
def test_hit_rate_is_the_cached_share_and_the_budget_holds(tmp_path, kept):
    source = Digits()
    dataset = cached(source, directory=tmp_path, memory_bytes=bytes_for(source, scale, kept) + 63)
    share = kept / len(source)
    for epoch in range(3):
        before = dataset.stats()
        for i in torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).tolist():
            dataset[i]
        seen = dataset.stats() - before
        assert seen.samples == 60
        if epoch == 0:
            assert (seen.reads_source, seen.admitted, seen.refused) == (60, kept, 60 - kept)
        else:
            assert seen.hit_rate == share == dataset.cached_share
            assert seen.refused == 60 - kept
            assert seen.hit_rate >= (share + (1 - share) * math.log1p(-share) if share < 1 else 1.0)  # of LRU
    (arena,) = tmp_path.glob("*.arena")
    assert arena.stat().st_size <= bytes_for(source, scale, kept) + 4096
    dataset.close()


def rank_of_a_node(directory, queue):
    dataset = cached(Digits(), directory=directory)
    before = dataset.stats()
    good = all(map(same, [dataset[i] for i in range(60)], plain(Digits(), 0)))
    seen = dataset.stats() - before
    queue.put((good, seen.hits_memory, seen.reads_source, seen.admitted))
    dataset.close()


def test_another_process_of_the_node_finds_what_this_one_put(tmp_path):
    dataset = cached(Digits(), directory=tmp_path)
    for i in range(25):
        dataset[i]
    queue = fork.SimpleQueue()
    other = fork.Process(target=rank_of_a_node, args=(tmp_path, queue))
    other.start()
    assert queue.get() == (True, 25, 35, 35)
    other.join()
    before = dataset.stats()
    assert (before.reads_source, before.hits_memory, before.admitted) == (60, 25, 60)
    for i in range(60):
        dataset[i]
    assert (dataset.stats() - before).hits_memory == 60
    dataset.close()


def test_killed_readers_leave_nothing_torn(tmp_path):
    source = jpegs(tmp_path)
    dataset = cached(source, decode, directory=tmp_path, disk=tmp_path / "disk")
    times = random.Random(1)
    for _ in range(30):
        kill_after(lambda: [dataset[i] for i in range(24)], times.uniform(0, 0.008))
    assert all(map(same, [dataset[i] for i in range(24)], plain(source, 0, decode)))
    assert dataset.cached_share == 1.0
    dataset.close()


def test_nothing_stale_is_served(tmp_path):
    source = jpegs(tmp_path)
    dataset = cached(source, decode, directory=tmp_path, verify="always", disk=tmp_path / "disk")
    old = dataset[3]
    assert same(dataset[3], old)
    write_jpeg(source.samples[3][0], Digits()[5][0])
    os.utime(source.samples[3][0], ns=(time.time_ns(), fingerprint_of(source, 4)[1] + 10**9))
    new = dataset[3]
    assert not same(new, old)
    assert same(new, plain(source, 0, decode)[3])
    assert dataset.stats().hits_memory == 1
    assert dataset.stats().hits_disk == 0
    dataset.close()
    for change in ({"version": 2}, {"prefix_id": "other"}, {"stored_size": 32}, {"dataset_id": "others"}):
        other = cached(source, decode, directory=tmp_path, **change)
        other[3]
        assert other.stats().hits_memory == 0, change
        other.close(delete=True)
    torch.set_default_dtype(torch.float64)
    try:
        other = cached(Digits(), directory=tmp_path)
        other[3]
        assert other.stats().hits_memory == 0
        other.close()
    finally:
        torch.set_default_dtype(torch.float32)


def test_verify_first_notices_when_it_is_opened_again(tmp_path):
    source = jpegs(tmp_path)
    dataset = cached(source, decode, directory=tmp_path)
    old = dataset[3]
    os.utime(source.samples[3][0], ns=(0, 0))
    assert same(dataset[3], old)
    assert dataset.stats().hits_memory == 1
    again = cached(source, decode, directory=tmp_path)
    assert same(again[3], old)  # the touched file is read again, and holds the same image
    assert again.stats().reads_source == dataset.stats().reads_source == 2
    again.close()
    assert same(dataset[3], old)  # one arena in this process, still open
    dataset.close()


def test_raw_copies_on_disk_serve_the_next_arena(tmp_path):
    source = jpegs(tmp_path)
    first = cached(source, decode, directory=tmp_path, disk=tmp_path / "disk")
    for i in range(24):
        first[i]
    assert first.stats().bytes_source == sum(os.path.getsize(path) + 8 for path, _ in source.samples)
    first.close(delete=True)
    assert not list(tmp_path.glob("*.arena"))
    torn = next(path for path in (tmp_path / "disk").glob("??/*"))
    torn.write_bytes(torn.read_bytes()[:-100])
    second = cached(source, decode, directory=tmp_path, disk=tmp_path / "disk", stored_size=32)
    assert all(map(same, [second[i] for i in range(24)], plain(source, 0, decode)))
    total = second.stats()
    assert (total.hits_disk, total.reads_source, total.hits_memory) == (23, 1, 0)
    assert total.bytes_disk > 0
    assert torn.stat().st_size > 100
    second.close()


def test_nodes_keep_their_own_block_only(tmp_path):
    source = Digits()
    nodes = [cached(source, directory=tmp_path, node=j, nodes=3) for j in range(3)]
    assert sorted(i for node in nodes for i in node.block.tolist()) == list(range(60))
    for node in nodes:
        for _ in range(2):
            assert all(map(same, [node[i] for i in range(60)], plain(source, 0)))
        assert node.cached_share == 1.0
        total = node.stats()
        assert (total.admitted, total.hits_memory, total.reads_source, total.refused) == (20, 20, 100, 0)
        node.close()


def test_a_changed_sample_does_not_change_the_arena(tmp_path):
    dataset = cached(Digits(), suffix=None, directory=tmp_path)
    for _ in range(3):
        image, _ = dataset[0]
        assert image.max() <= 1
        image.fill_(99)
    dataset.close()
