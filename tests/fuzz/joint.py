"""Scripts in which one rank alone, with both ranks' batches, must do what two ranks do.

With exact methods, K-FAC, layer-wise optimizers, accumulation and clipping.
"""

import contextlib

import torch
from thinwire.kfac import KFAC
from thinwire.optim import LAMB, LARS

import thinwire as tw
from fuzz.models import build, loss_of
from fuzz.player import Mismatch, alone_group, close

KINDS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "LARS": LARS, "LAMB": LAMB}


class Joint:
    """The model of two ranks, and a model that this rank trains alone, attached in a group of its own."""

    def __init__(self, case, rank, folder):
        self.case, self.rank, self.number, self.marks, self.place = case, rank, 0, [], "attach"

    def begin(self):
        self.both, self.alone = (self._attached(**kw) for kw in ({}, {"process_group": alone_group()}))

    def _attached(self, **group):
        net = build(self.case["model"], self.case["seed"])
        optimizer = KINDS[self.case["optimizer"]["kind"]](net.parameters(), **self.case["optimizer"]["options"])
        sync = tw.attach(net, optimizer, self.case["method"], timeout=20, **self.case["options"], **group)
        kfac = None if self.case["kfac"] is None else KFAC(net, sync, **self.case["kfac"])
        return net, optimizer, sync, kfac

    def play(self, first):
        for place, event in enumerate(self.case["events"][first:], first):
            self.place, left = place, event.get("left", [1, 1])  # batches of each rank
            with self.both[2].join() if "left" in event else contextlib.nullcontext():
                for turn in range(max(left)):
                    numbers = range(self.number + 1, self.number + 2 + event["micro"])
                    self.number = numbers[-1]
                    going = [rank for rank in range(2) if turn < left[rank]]
                    if self.rank in going:
                        self._turn(self.both, event, [(self.rank, n) for n in numbers])
                    self._turn(self.alone, event, [(rank, n) for rank in going for n in numbers])
            self._compare()
        self.place = "the end"
        for _, _, sync, _ in (self.both, self.alone):
            sync.synchronize()
        self._compare()
        for _, _, sync, kfac in (self.both, self.alone):
            if kfac is not None:
                kfac.close()
            sync.close()

    def _turn(self, one, event, passes):
        net, optimizer, sync, _ = one
        for done, (rank, number) in enumerate(passes, 1):
            last = done == len(passes) and event["last"] == "backward"
            with contextlib.nullcontext() if last else sync.no_sync():
                (loss_of(net, self.case, rank, number) / len(passes)).backward()
        if event["last"] != "backward":
            sync.synchronize()
        if event["clip"] is not None:
            sync.clip_grad_norm_(event["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=event["zero"] == "none")

    def _compare(self):
        theirs = dict(self.alone[0].named_parameters())
        for name, p in self.both[0].named_parameters():
            if (text := close(p, theirs[name], 1e-6)) is not None:
                raise Mismatch(f"on two ranks, against one with both batches, {name}: {text}")
