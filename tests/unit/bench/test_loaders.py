"""A user's own DataLoader: each rank's batches, step by step and epoch after epoch."""

import random
from collections import Counter, namedtuple

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from thinwire.tools.bench.models.loaders import Feed, losses

Pair = namedtuple("Pair", "x y")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


def numbers(**options):
    return DataLoader(range(10), 2, **options)


def distributed(rank, workers):
    return numbers(sampler=DistributedSampler(range(10), workers, rank))


def drawn_again(rank, workers):
    return (torch.tensor([rank + step]) for step in range(3))


def read(data, rank, steps):
    feed = Feed("own", data, workers=2)
    return [feed.batch(step, rank).tolist() for step in range(steps)]


SHUFFLED = {
    "shuffle": lambda: numbers(shuffle=True),
    "generator": lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "batch sampler": lambda: DataLoader(range(10), batch_sampler=BatchSampler(torch.randperm(10).tolist(), 2, False)),
    "in order": numbers,
    "stream": lambda: DataLoader(Stream(), 2),
    "list": lambda: [torch.tensor([i, i + 1]) for i in range(0, 10, 2)],
    "processes": lambda: numbers(shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_ranks_share_each_epoch_and_no_batch_is_seen_twice_in_it(kind):
    """Five batches an epoch, for two ranks: after five steps, two epochs are over."""
    data = SHUFFLED[kind]()
    first, second = read(data, 0, 5), read(data, 1, 5)
    turns = [batch for pair in zip(first, second) for batch in pair]
    assert Counter(i for batch in turns[:5] for i in batch) == Counter(range(10))
    assert Counter(i for batch in turns[5:] for i in batch) == Counter(range(10))
    assert (turns[:5] == turns[5:]) == (kind not in ("shuffle", "generator", "processes"))


@pytest.mark.parametrize("kind", SHUFFLED)
def test_the_same_step_and_rank_give_the_same_batch(kind):
    """Whoever else has read in between, from the same loader or one built again, and however far a step is."""
    data = SHUFFLED[kind]()
    feed, other = Feed("own", data, 2), Feed("own", data, 2)
    steps = [feed.batch(step, 1).tolist() for step in range(7)]
    torch.rand(3)
    assert [other.batch(step, 1).tolist() for step in (0, 6, 2, 3, 3)] == [steps[i] for i in (0, 6, 2, 3, 3)]
    assert feed.batch(7, 1).tolist() == other.batch(7, 1).tolist()


def test_an_epoch_of_many_batches_is_one_order():
    data = DataLoader(range(301), 1, shuffle=True)
    turns = [batch for pair in zip(read(data, 0, 301), read(data, 1, 301)) for batch in pair]
    assert sorted(turns[:301]) == sorted(turns[301:]) == [[i] for i in range(301)]
    assert turns[:301] != turns[301:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_the_number_of_ranks_is_unknown_each_reads_all_in_another_order(shuffle):
    feed = Feed("own", numbers(shuffle=shuffle))
    found = [[feed.batch(step, rank).tolist() for step in range(5)] for rank in (0, 64, 128)]
    assert len({str(rank) for rank in found}) == 3


def test_a_distributed_sampler_keeps_its_share_and_learns_of_epochs():
    ranks = [read(distributed, rank, 6) for rank in range(2)]
    assert Counter(i for rank in ranks for batch in rank[:3] for i in batch) == Counter(range(10))
    assert ranks[0][:3] != ranks[0][3:]
    assert [read(distributed(rank, 2), rank, 6) for rank in range(2)] == ranks


def test_a_function_is_asked_for_each_rank_and_again_when_a_generator_ends():
    assert read(drawn_again, 1, 5) == [[1], [2], [3], [1], [2]]


def test_what_a_data_set_draws_is_the_batchs_own_and_the_models_draws_go_on():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    feed = Feed("own", DataLoader(Augmented(), 2))
    seen = [torch.rand(()), feed.batch(0, 0), torch.rand(())]
    assert torch.equal(torch.stack(seen[::2]), expected)
    assert torch.equal(Feed("own", DataLoader(Augmented(), 2)).batch(0, 0), seen[1])
    assert not torch.equal(feed.batch(5, 0)[:, 1:], seen[1][:, 1:])  # the same samples, an epoch later


def test_held_out_data_are_shared_and_where_there_are_too_few_all_look_at_all():
    _, held_out = losses("own", [torch.tensor([float(i)]) for i in range(3)], None, 2)
    model = torch.nn.Identity()
    model.anchor = torch.nn.Parameter(torch.zeros(()))
    assert [held_out(model, 0, rank).item() for rank in range(2)] == [1.0, 1.0]
    _, held_out = losses("own", [torch.tensor([2.0])], None, 2)
    assert [held_out(model, 0, rank).item() for rank in range(2)] == [2.0, 2.0]
    many = [torch.tensor([float(i)]) for i in range(1000)]
    assert losses("own", many, None, 2)[1](model, 0, 0).item() == sum(range(0, 32, 2)) / 16


class Answers(torch.nn.Module):
    """Takes named inputs and answers as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        return {"loss": (self.weight * x - y).square().mean(), "devices": (x.device, y.device)}


@pytest.mark.parametrize("kind", [lambda x, y: {"x": x, "y": y}, lambda x, y: (x, y), lambda x, y: [x, y], Pair])
def test_batches_are_moved_whole_and_the_loss_is_found_in_the_output(kind):
    model = Answers()
    batch = kind(torch.full((2,), 3.0), torch.ones(2))
    assert losses("own", [batch], None)[0](model, 0, 0).item() == 4.0

    def loss(model, batch):
        assert type(batch) is type(kind(0, 0))
        x, y = batch.values() if isinstance(batch, dict) else batch
        assert x.device == y.device == torch.device("meta")
        return model(x, y)["loss"]

    assert losses("own", [batch], loss)[0](model.to("meta"), 0, 0).shape == ()


def test_lists_in_order_of_a_sampler_of_ones_own():
    data = DataLoader(range(6), batch_sampler=BatchSampler(SequentialSampler(range(6)), 4, drop_last=False))
    feed = Feed("own", data)
    assert [feed.batch(step, 0).tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
