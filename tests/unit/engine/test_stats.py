"""What ``print(sync.stats())`` shows."""

import torch

import thinwire as tw
from thinwire.core.tcp_info import Wire
from thinwire.engine.stats import Stats


def test_a_line_for_each_fact_that_a_user_asks_first():
    stats = Stats(
        "powersgd", "rank 4 as asked for", 4, steps=50, rejected_steps=2, bytes_sent=1_600_000, dense_bytes=19_800_000,
        exposed_seconds=1.5, rank=3, why=("the link is slow",), wire=Wire(0.025, 0.001, 4, "bbr"),
    )  # fmt: skip
    assert str(stats).splitlines() == [
        "method: powersgd",
        "        rank 4 as asked for",
        "        the link is slow",
        "steps:  50 on 4 ranks, 2 rejected",
        "sent:   1.60 MB by rank 3",
        "exact:  19.8 MB, 12.4 times as much",
        "waited: 1.50 s for communication, 30 ms a step",
        "wire:   round trip 25.0 ms, 0.10% of the packets sent again, 4 sockets with bbr",
    ]
    assert f"{stats}" == str(stats)
    assert "bytes_sent=1600000" in repr(stats)


def test_nothing_has_run_yet():
    model = torch.nn.Linear(2, 2)
    with tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "powersgd") as sync:
        lines = str(sync.stats()).splitlines()
    assert lines[0] == "method: ssgd"
    assert "powersgd runs as ssgd" in " ".join(lines[1:-4])
    assert max(map(len, lines)) <= 100
    assert lines[-4:] == [
        "steps:  0 on 1 rank",
        "sent:   0 kB by rank 0",
        "waited: 0.0 ms for communication",
        "wire:   round trip under 4 ms",
    ]
