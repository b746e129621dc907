"""The cache between the libraries that others use: torchdata, webdataset, mosaicml-streaming; skipped where missing."""

import importlib.util
import io
import sys
import tarfile
import types

import pytest
import torch
from cache_sources import Digits, Jpegs, cached, decode, same, shift
from torch.utils.data import DataLoader

from thinwire.core.kernels.seeding import generator
from thinwire.systems.data import CachedDataset, LocalitySampler


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("workers, stop", [(0, 3), (2, 3)])
def test_stateful_loader_resumes_in_mid_epoch(tmp_path, workers, stop):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def make():
        dataset = cached(Digits(), directory=tmp_path)
        sampler = LocalitySampler(dataset, rank=0, ranks_per_node=1)
        loader = torchdata.StatefulDataLoader(
            dataset, batch_size=7, sampler=sampler, num_workers=workers, collate_fn=list
        )
        return sampler, loader

    sampler, loader = make()
    sampler.set_epoch(2)
    whole = [sample for batch in loader for sample in batch]
    sampler.set_epoch(2)
    batches = iter(loader)
    head = [sample for _ in range(stop) for sample in next(batches)]
    state = loader.state_dict()
    del batches
    _, other = make()
    other.load_state_dict(state)
    resumed = head + [sample for batch in other for sample in batch]
    assert len(resumed) == len(whole) == 60
    assert all(map(same, resumed, whole))  # the augmentation too


def shard(path, source):
    """A webdataset shard: JPEG files and their labels in a tar."""
    with tarfile.open(path, "w") as tar:
        for i, (data, label) in enumerate(source):
            for name, content in ((f"{i:03d}.jpg", data), (f"{i:03d}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def from_shard(raw):
    return decode((raw["jpg"], int(raw["cls"])))


def name_of(raw):
    return raw["__key__"]


def brightness(sample):
    """For an order that does not depend on which worker read what."""
    return float(sample[0].sum())


@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_is_decoded_once(tmp_path, workers):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    source = Jpegs(tmp_path)
    shard(tmp_path / "0.tar", source)
    shard(tmp_path / "1.tar", source)  # a copy: its keys are the same samples
    urls = [str(tmp_path / "0.tar"), str(tmp_path / "1.tar")]
    stream = CachedDataset.stream(
        webdataset.WebDataset(urls, shardshuffle=False),
        from_shard,
        shift,
        key=name_of,
        dataset_id="shards",
        version=1,
        prefix_id="from_shard",
        memory_bytes=8 << 20,
        capacity=100,
        directory=tmp_path,
    )
    for epoch in range(2):
        stream.set_epoch(epoch)
        expected = [shift(decode(source[i]), generator(0, epoch, f"{i:03d}")) for i in range(24)]
        got = list(DataLoader(stream, num_workers=workers, batch_size=None))
        assert len(got) == 48
        assert all(map(same, sorted(got, key=brightness), sorted(expected * 2, key=brightness)))
    total = stream.stats()
    assert total.admitted == 24
    assert total.samples == 96
    assert total.hits_memory >= 48
    if workers == 0:
        assert total.hits_memory == 72
    stream.close()


@pytest.fixture
def streaming(monkeypatch):
    """The real package, without its part for images, unused here: that wants a torchvision made for this very torch."""
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("mosaicml-streaming is not installed: it wants transformers below 5 and numpy below 2.2")
    monkeypatch.setitem(sys.modules, "streaming.vision", types.ModuleType("streaming.vision"))
    return importlib.import_module("streaming")


def test_streaming_dataset_as_source(tmp_path, streaming):
    source = Jpegs(tmp_path)
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"image": "bytes", "label": "int"}) as writer:
        for data, label in source:
            writer.write({"image": data, "label": label})
    remote = streaming.StreamingDataset(
        remote=str(tmp_path / "mds"), local=str(tmp_path / "local"), batch_size=1, shuffle=False
    )
    dataset = cached(remote, from_record, directory=tmp_path)
    assert len(dataset) == 24
    for _ in range(2):
        got = [dataset[i] for i in range(24)]
        assert all(map(same, got, [shift(decode(source[i]), generator(0, 0, i)) for i in range(24)]))
    assert (dataset.stats().hits_memory, dataset.stats().reads_source) == (24, 24)
    dataset.close()
    with pytest.raises(ValueError, match=r"leave disk= out"):
        cached(remote, from_record, directory=tmp_path, disk=tmp_path / "disk")


def test_a_streaming_dataset_that_may_delete_its_only_copy(tmp_path, streaming):
    with streaming.MDSWriter(out=str(tmp_path / "only"), columns={"label": "int"}) as writer:
        writer.write({"label": 1})
    only = streaming.StreamingDataset(local=str(tmp_path / "only"), batch_size=1, cache_limit="1gb")
    with pytest.raises(ValueError, match="can delete the only copy"):
        cached(only, from_record, directory=tmp_path)


def from_record(record):
    return decode((record["image"], record["label"]))


def test_a_plain_generator_is_a_source_too(tmp_path):
    stream = CachedDataset.stream(
        Digits(20),
        lambda raw: torch.tensor(raw[0]),
        key=lambda raw: raw[0].tobytes().hex(),
        dataset_id="digits",
        version=1,
        prefix_id="tensor",
        capacity=30,
        memory_bytes=8 << 20,
        directory=tmp_path,
    )
    first, second = list(stream), list(stream)
    assert all(torch.equal(a, torch.tensor(raw[0])) for a, raw in zip(first, Digits(20), strict=True))
    assert all(map(torch.equal, first, second))
    assert (stream.stats().hits_memory, stream.stats().reads_source) == (20, 20)
    stream.close(delete=True)
