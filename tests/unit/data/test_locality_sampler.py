"""LocalitySampler: every sample of the node's block once per epoch, resumable."""

import pytest
from cache_sources import Digits, cached
from torch.utils.data import DataLoader

from thinwire.systems.data import LocalitySampler


def world(tmp_path, samples, nodes, ranks_per_node, **options):
    datasets = [cached(Digits(samples), directory=tmp_path, node=j, nodes=nodes) for j in range(nodes)]
    return [
        LocalitySampler(datasets[rank // ranks_per_node], rank=rank, ranks_per_node=ranks_per_node, **options)
        for rank in range(nodes * ranks_per_node)
    ]


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), (2, 2), (3, 2)])
def test_every_sample_once_per_epoch(tmp_path, nodes, ranks_per_node):
    samplers = world(tmp_path, 60, nodes, ranks_per_node)
    epochs = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in samplers])
        assert sorted(i for order in epochs[-1] for i in order) == list(range(60))
        for rank, order in enumerate(epochs[-1]):
            assert set(order) <= set(samplers[rank].dataset.block.tolist())
            assert len(order) == len(samplers[rank])
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("drop_last, count", [(True, 7), (False, 8)])
def test_equal_counts_where_it_does_not_divide(tmp_path, drop_last, count):
    samplers = world(tmp_path, 59, 2, 4, drop_last=drop_last)  # blocks of 29 and 30
    orders = [list(sampler) for sampler in samplers]
    assert [len(order) for order in orders] == [count] * 8
    seen = [i for order in orders for i in order]
    assert len(set(seen)) == (56 if drop_last else 59)


def test_locality_means_hits(tmp_path):
    samplers = world(tmp_path, 60, 2, 2)
    for sampler in samplers:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for _ in DataLoader(sampler.dataset, batch_size=5, sampler=sampler, collate_fn=list):
                pass
    for dataset in (samplers[0].dataset, samplers[2].dataset):
        total = dataset.stats()
        assert (total.reads_source, total.hits_memory) == (30, 30)


def test_it_goes_on_where_it_was(tmp_path):
    (sampler,) = world(tmp_path, 60, 1, 1)
    sampler.set_epoch(4)
    running = iter(sampler)
    head = [next(running) for _ in range(23)]
    state = sampler.state_dict()
    assert state == {"epoch": 4, "given": 23}
    (other,) = world(tmp_path, 60, 1, 1)
    other.load_state_dict(state)
    assert other.dataset.epoch == 4
    assert other.state_dict() == state
    assert head + list(other) == sampler.order(4)
    assert list(other) == sampler.order(4)  # the next iterator begins at the beginning


def test_refusals(tmp_path):
    dataset = cached(Digits(), directory=tmp_path, node=1, nodes=2)
    with pytest.raises(ValueError, match="is on node 0, but the data set was made with node=1"):
        LocalitySampler(dataset, rank=1, ranks_per_node=2)
    with pytest.raises(ValueError, match="too few"):
        LocalitySampler(dataset, rank=50, ranks_per_node=50)
    with pytest.raises(ValueError, match="at least 1"):
        LocalitySampler(dataset, rank=0, ranks_per_node=0)
