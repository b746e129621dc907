"""Scripts of local steps at each rank's own pace, against rounds in one process in which ranks step where they did.

Each rank's clock is a fake one, so that a script decides how long its steps take.
"""

import copy

import torch
import torch.distributed as dist

import thinwire as tw
from fuzz.models import build, loss_of
from fuzz.player import Mismatch, close, digest
from thinwire.engine.local import pace as pace_module
from thinwire.engine.local.settings import local_settings
from thinwire.engine.local.travel import LocalRanks


class Paces:
    """Two ranks, whose speeds change at some steps, and which begin again from a checkpoint at others."""

    def __init__(self, case, rank, folder):
        self.case, self.rank, self.place, self.marks = case, rank, "attach", []
        self.now, self.seconds, self.seen, self.events = 0.0, 1.0, [], list(case["events"])

    def clock(self):
        self.now += self.seconds
        return self.now

    def begin(self):
        self.attach()

    def attach(self, state=None):
        self.net = build(self.case["model"], self.case["seed"])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.sync = tw.attach(self.net, self.optimizer, "local", pace="own", timeout=20, keep_dense="none",
                              start_compression_step=0, **self.case["options"])  # fmt: skip
        if state is not None:
            for one, saved in zip((self.net, self.optimizer, self.sync), state, strict=True):
                one.load_state_dict(saved)

    def play(self, first):
        real, pace_module.clock = pace_module.clock, self.clock
        try:
            while not self._loop():
                state = [copy.deepcopy(one.state_dict()) for one in (self.net, self.optimizer, self.sync)]
                self.sync.close()
                self.attach(state)
            self.place = "the end"
            self.sync.finish()
            self.sync.close()
        finally:
            pace_module.clock = real
        self.marks.append((self.place, "weights after finish()", digest(self.net.parameters())))
        self._compare()

    def _loop(self):
        """Train; return whether that is over, or training goes on from a checkpoint."""
        for step in self.sync.steps(self.case["total"]):
            self.place = step
            while self.events and step >= self.events[0]["at"]:
                if self.events[0]["do"] == "again":
                    if self.sync.in_step:
                        self.events.pop(0)
                        return False
                    break
                self.seconds = self.events.pop(0)["seconds"][self.rank]
            self._step(self.net, self.optimizer, self.rank, step)
            self.seen.append(step)
        return True

    def _step(self, net, optimizer, rank, step):
        loss_of(net, self.case, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def _compare(self):
        everyone = [None, None]
        dist.all_gather_object(everyone, self.seen)
        nets = [build(self.case["model"], self.case["seed"]) for _ in everyone]
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
        local = local_settings("local", {"pace": "own", **self.case["options"]})
        twins = LocalRanks(local, [dict(net.named_parameters()) for net in nets], start=0)
        for step in range(self.case["total"]):
            for rank, seen in enumerate(everyone):
                if step in seen:
                    before = max((one for one in seen if one < step), default=-1)
                    for fragment in twins.rounds[rank].fragments if local.look is not None else ():
                        fragment.look(step - before)
                    self._step(nets[rank], optimizers[rank], rank, step)
            with torch.no_grad():
                twins.step()
        with torch.no_grad():
            twins.finish()
        for (name, p), q in zip(self.net.named_parameters(), nets[self.rank].parameters(), strict=True):
            if (text := close(p, q, 1e-9)) is not None:
                raise Mismatch(f"after steps {everyone}, {name}: {text}")
