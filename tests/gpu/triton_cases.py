"""Triton kernels against their torch twins: for pytest on a GPU, for ``python triton_cases.py`` in the interpreter."""

from importlib import import_module

import torch

from thinwire.core.kernels import pairs

exact, gaussian, histogram, mstopk, threshold = (
    import_module(f"thinwire.core.kernels.select.{name}")
    for name in ("exact", "gaussian", "histogram", "mstopk", "threshold")
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def selection(device):
    """Sets of indices are equal, but for "exact" and "threshold" among equals."""
    u = 0.7312345678901234
    for d, k, *kinds in ((7, 6, "drawn"), (1025, 103, "drawn", "zeros", "few", "bad"), (33_001, 300, "drawn", "seen")):
        for kind in kinds:
            x = torch.randn(d, generator=seeded(d))
            if kind == "bad":
                x[::7], x[::21] = torch.inf, torch.nan
            elif kind == "seen":  # only the sample's entries are large: the bound is too high
                x[torch.arange(d) % 9 > 0] = 0
            x = (0 * x if kind == "zeros" else x.round() if kind == "few" else x).to(device)
            for choose, *options in (
                (exact.choose,),
                (threshold.choose, 0.1, 0.5, u, 0.01, 10),
                (histogram.choose, u, None, "line"),
                (histogram.choose, u, 2, "circular"),
                (mstopk.choose, u, 30, "auto", "circular"),
                (mstopk.choose, u, 3, "min", "line"),
                (gaussian.choose, u, 3, "circular"),
            ):
                want, got = choose.twin(x, k, *options), choose.launch(x, k, *options)
                assert got.unique().numel() == k, (d, kind, options)
                assert (got.diff() > 0).all(), (d, kind, options)
                if kind == "bad":
                    assert not x[got].isfinite().any(), (d, kind, options)
                elif len(options) in (0, 5):
                    assert torch.equal(x[got].abs().sort().values, x[want].abs().sort().values), (d, kind, options)
                else:
                    assert torch.equal(got, want.sort().values), (d, kind, options)


def messages(device):
    """Of pairs; the interpreter does not round to bf16 as a GPU does."""
    cases = ((9, 1, 1, torch.float32), (9001, 300, 5, torch.float32), (4099, 301, 2, torch.float16))
    for d, k, ranks, wire in (*cases, (500, 500, 3, torch.float16), (500, 33, 3, torch.bfloat16)):
        for bad in (None, ranks - 1):
            draw, sent = seeded(d), []
            for rank in range(ranks):
                a = torch.randn(d, generator=draw) * 10000
                a = (a.bfloat16().float() if wire == torch.bfloat16 else a * 10).to(device)
                indices = torch.randperm(d, generator=draw)[:k].sort().values.to(device)
                a[indices[0]] = torch.inf if rank == bad else 1.0
                finite, left = torch.tensor(rank != bad, device=device), a.clone()
                sent.append(pairs.send.twin(a, indices, finite, wire))
                assert torch.equal(pairs.send.launch(left, indices, finite, wire), sent[-1]) or rank == bad
                assert torch.equal(left.nan_to_num(7), a.nan_to_num(7)), (d, wire)
            want, got = torch.empty(d, device=device), torch.empty(d, device=device)
            for scale in (None, torch.tensor(8.7, device=device)):
                options = torch.stack(sent), k, wire, 7, scale
                verdicts = pairs.average.twin(want, *options), pairs.average.launch(got, *options)
                assert [bool(x) for x in verdicts] == [bad is None] * 2, (d, wire, bad)
                assert torch.equal(got, want) if bad is None else got.isnan().all(), (d, wire)


def merges(device):
    for d, k in ((1, 1), (40, 12), (3000, 1100)):
        draw, lists = seeded(d), []
        for _ in range(2):
            values = (2 * torch.randn(k, generator=draw)).round().to(device)
            lists += [values, torch.randperm(d, generator=draw)[:k].sort().values.to(device)]
        want, got = pairs.union.twin(*lists), pairs.union.launch(*lists)
        for x, y in zip(got, want):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), (d, k)
        for values in (want[0], torch.full_like(want[0], torch.nan)):
            kept = pairs.largest.twin(values, want[1], k)
            assert torch.equal(pairs.largest.launch(values, want[1], k), kept), (d, k)


ALL = [selection, messages, merges]

if __name__ == "__main__":
    for compare in ALL:
        compare("cpu")
    print("equal")
