"""word_language_model's loop: an LSTM whose state is carried on, clipping, and weights that are updated by hand."""

import os

import pytest
import torch
import torch.distributed as dist
from loops import Trail, Wire, assert_equal, assert_ranks_equal, text
from torch import nn

from spawned import run

pytestmark = pytest.mark.dist

COLUMNS, LENGTH, RATE = 8, 16, 5.0


class Recurrent(nn.Module):
    """Embedding, LSTM of two layers, decoder with the embedding's weights."""

    def __init__(self, width=20, layers=2):
        super().__init__()
        self.width, self.layers = width, layers
        self.drop, self.encoder = nn.Dropout(0.1), nn.Embedding(128, width)
        self.rnn, self.decoder = nn.LSTM(width, width, layers), nn.Linear(width, 128)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x, hidden):
        y, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(y)).flatten(0, 1), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(self.layers, COLUMNS, self.width) for _ in range(2))


def _columns(codes):
    rows = len(codes) // COLUMNS
    return codes[: rows * COLUMNS].view(COLUMNS, rows).t().contiguous()


def _batches(source):
    for i in range(0, len(source) - 1, LENGTH):
        length = min(LENGTH, len(source) - 1 - i)
        yield source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


def _detached(hidden):
    return tuple(h.detach() for h in hidden)


@torch.no_grad()
def _evaluate(net, model, source):
    net.eval()
    hidden, total = model.init_hidden(), 0.0
    for x, y in _batches(source):
        output, hidden = net(x, hidden)
        total += len(x) * float(nn.functional.cross_entropy(output, y))
    return total / (len(source) - 1)


def _train(rank, way, method="ssgd", *, epochs=2, folder=None, **how):
    torch.manual_seed(1111)
    whole = text()
    part = 2000  # of the text, for each rank
    mine, held = _columns(whole[part * rank : part * (rank + 1)]), _columns(whole[-2000:])
    model, trail, rate, best = Recurrent(), Trail(), RATE, None
    with Wire(way, model, None, method, **how) as wire:
        torch.manual_seed(rank)  # of the dropout
        for epoch in range(epochs):
            wire.net.train()
            hidden = model.init_hidden()
            for x, y in _batches(mine):
                wire.net.zero_grad()
                hidden = _detached(hidden)
                output, hidden = wire.net(x, hidden)
                loss = nn.functional.cross_entropy(output, y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                for p in model.parameters():
                    p.data.add_(p.grad, alpha=-rate)
                trail.step(loss, model)
            trail.evaluated[epoch] = _evaluate(wire.net, model, held)
            if best is None or trail.evaluated[epoch] < best:
                best = trail.evaluated[epoch]
                if folder and rank == 0:
                    torch.save(model, os.path.join(folder, f"{way}.pt"))  # the module itself, as there
            else:
                rate /= 4.0
        if folder:
            dist.barrier()
            saved = torch.load(os.path.join(folder, f"{way}.pt"), weights_only=False)
            saved.rnn.flatten_parameters()
            trail.evaluated["read"] = _evaluate(saved, saved, held)
        if way != "ddp":
            trail.stats.append(wire.ours.stats())
    return trail


def _exact(rank, size, folder):
    return {way: _train(rank, way, folder=folder) for way in ("ddp", "hook", "attach")}


def test_ssgd_is_ddp(tmp_path):
    results = run(_exact, 2, str(tmp_path))
    for found in results:
        for way in ("hook", "attach"):
            assert_equal(found[way], found["ddp"])
            assert found[way].evaluated == found["ddp"].evaluated
        assert found["ddp"].evaluated["read"] == min(found["ddp"].evaluated.values()) < 4
    assert_ranks_equal([found["attach"] for found in results])
