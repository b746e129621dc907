"""Scripts under local steps: each twin has an optimizer of its own, and the rounds run in lockstep beside the ranks."""

import contextlib

import torch

from fuzz.player import Mismatch, Player, close, digest, optimizers_of, scaler_of, tensors_of
from thinwire.core.methods.base import all_finite
from thinwire.core.program import Topology, working_dtype
from thinwire.core.program.local_world import run_lockstep
from thinwire.engine.local.rounds import Rounds
from thinwire.engine.local.settings import local_settings
from thinwire.engine.parameters import managed_parameters


class Statistics:
    """Running statistics of both twins, named buffers, and frozen parameters while the script changes them: the mean.

    Other buffers become rank 0's, and keep what was counted meanwhile. Every eighth round looks for what has changed.
    """

    def __init__(self, nets, buffers, frozen, averaged):
        self.nets, self.sent, self.names, self.frozen, self.changing = nets, [], list(buffers), frozen, set()
        self.averaged = averaged
        self.seen = [{name: dict(nets[0].named_parameters())[name].detach().clone() for name in frozen}] * 2

    def attached(self, *, fresh):
        """By another handle: to a ``fresh`` model all that is loaded is a change, to this one what had changed."""
        now = dict(self.nets[0].named_parameters())
        known = {n: None if fresh or n in self.changing else now[n].detach().clone() for n in self.frozen}
        self.seen = [known] * 2

    def look(self, round_=0):
        if round_ % 8:
            return
        rows = [
            {name: dict(net.named_parameters())[name].detach().clone() for name in self.frozen} for net in self.nets
        ]
        pairs = [*zip(rows, self.seen)]
        self.changing = {
            name
            for now, was in pairs
            for name in now
            if was[name] is None or digest([now[name]]) != digest([was[name]])
        }
        self.seen = rows

    def _mean(self, name, x):
        key = name.rpartition(".")[2]
        return x.is_floating_point() and (
            not name.startswith("buffer ")
            or key.startswith("running_")
            or name.removeprefix("buffer ") in self.averaged
        )

    def send(self):
        rows = [tensors_of(net) for net in self.nets]
        names = [*(f"buffer {name}" for name in self.names), *sorted(self.changing)]
        self.sent = [(name, [row[name].detach().clone() for row in rows]) for name in names]

    @torch.no_grad()
    def merge(self):
        for name, sent in self.sent:
            for net, before in zip(self.nets, sent):
                x = tensors_of(net)[name]
                if self._mean(name, x):
                    kind = working_dtype(x.dtype)
                    some = [s.to(kind) for s in sent if bool(all_finite(s.to(kind)))]
                    new = sum(some) / len(some) if some else x
                elif digest([sent[0]]) == digest([before]):
                    new = x
                elif x.is_signed() and not x.is_floating_point() and x.dtype is not torch.bool:
                    new = sent[0] + (x - before)
                else:
                    new = sent[0]
                x.data = new.to(x.dtype).clone()
        self.sent = []


class Lockstep:
    """Both ranks' rounds, driven as the engine drives them."""

    def __init__(self, settings, nets, dense, topology, *, start, buffers, private):
        named = [(name, p) for name, p in nets[0].named_parameters() if name not in private]
        names = [name for name, p in named if p.requires_grad]
        weights = [{name: dict(net.named_parameters())[name] for name in names} for net in nets]
        self.rounds = [Rounds(settings, own, dense, r, topology, start=start) for r, own in enumerate(weights)]
        self.topology = topology
        frozen = [name for name, p in named if not p.requires_grad]
        self.statistics = Statistics(nets, buffers, frozen, settings.average_buffers)

    def stepped(self, rate):
        for rounds in self.rounds:
            rounds.stepped(rate)
        self._merge([rounds.arriving() for rounds in self.rounds])
        self._send([rounds.leaving() for rounds in self.rounds])
        self._merge([rounds.arriving() for rounds in self.rounds])

    def finish(self):
        self.statistics.look()
        self._merge([sorted(rounds.travelling(), key=lambda f: f.due) for rounds in self.rounds])
        for index in range(len(self.rounds[0].fragments)):
            group = [[rounds.fragments[index]] for rounds in self.rounds]
            self._send(group, last=True)
            self._merge(group)

    def _send(self, groups, *, last=False):
        for group in zip(*groups, strict=True):
            if self._ends(group) and not last:
                self.statistics.look(group[0].state.step)
            programs = [rounds.send(f, last=last) for rounds, f in zip(self.rounds, group)]
            for one in zip(*programs, strict=True):
                run_lockstep(one, self.topology)
            for f in group:
                f.receive()
            if self._ends(group):
                self.statistics.send()

    def _merge(self, groups):
        for group in zip(*groups, strict=True):
            for rounds, f in zip(self.rounds, group):
                rounds.merge(f)
            if self._ends(group):
                self.statistics.merge()

    def _ends(self, group):
        return group[0] is self.rounds[0].fragments[-1]

    def virtual(self):
        """The mean of x - E: what a round leaves as it is."""
        found = {}
        for pair in zip(*(rounds.fragments for rounds in self.rounds)):
            for name in pair[0].parameters:
                rows = [f.parameters[name].detach().double() for f in pair]
                owed = [f.state.extended(name, x.shape) for f, x in zip(pair, rows) if name in f.state.residuals]
                found[name] = (sum(rows) - sum(x.double() for x in owed)) / 2
        return found

    def outer(self):
        return {n: x for f in self.rounds[0].fragments for n, x in zip(f.parameters, f.anchors)}


class LocalSteps(Player):
    """A script whose ranks train by themselves for some steps."""

    def begin_twins(self):
        self.twin_steps = [optimizers_of(self.case, net)[0] for net in self.twins]
        self.twin_scalers = [scaler_of(self.case) for _ in self.twins]
        self.lockstep = None

    def twin_optimizers(self):
        return [o for some in self.twin_steps for o in some]

    def attach(self, **options):
        super().attach(**{k: v for k, v in options.items() if k != "scaler"})
        self.trainable = {n for n, p in self.net.named_parameters() if p.requires_grad and n not in self.ignored()}
        if self.lockstep is None:
            self._anew()

    def _anew(self):
        attach = self.case.get("attach", {})
        self.settings = local_settings(self.case["method"], self.extra())
        managed = managed_parameters(self.net, self.settings.method, self.keep_dense, sharded="family" in self.case)
        dense = [m.name for m in managed if m.dense]
        self.lockstep = Lockstep(
            self.settings, self.twins, dense, Topology(2, 1 if attach.get("apart") else 2),
            start=attach.get("start_compression_step"), buffers=self._averaged(), private=self.ignored(),
        )  # fmt: skip

    def _averaged(self):
        averages = self.case.get("attach", {}).get("broadcast_buffers", True)
        return [n for n, _ in self.net.named_buffers() if averages and n not in self.ignored()]

    def owed(self):
        return {}  # ``finish`` has sent it

    # --- events ----------------------------------------------------------------------------------------------------

    def turn(self, event):
        self.rate(event, [*self.optimizers, *self.twin_optimizers()])
        kept = []
        self._passes(event)
        if event["end"] == "sam":
            for net in (self.net, *self.twins):
                kept.append(self._climb(net))
            self._zero(event)
            self._passes(event | {"micro": 0})
        for some in kept:
            for p, value in some:
                p.data.copy_(value)
        if event["end"] != "drop":
            self._step(event)
        self._zero(event)
        if event.get("look", True):
            self.look()

    def _passes(self, event):
        for micro in range(event.get("micro", 0) + 1):
            self.number += 1
            final = micro == event.get("micro", 0)
            for net, rank in self.everyone():
                scaler = self.scaler if net is self.net else self.twin_scalers[rank]
                with contextlib.nullcontext() if final else self.sync.no_sync():
                    self.passed(net, rank, event, self.number, by_hand=event.get("last") == "by hand", scaler=scaler)

    @torch.no_grad()
    def _climb(self, net):
        own = [(p, p.detach().clone()) for p in net.parameters() if p.requires_grad and p.grad is not None]
        for p, _ in own:
            p.add_(p.grad, alpha=0.05)
        return own

    def _zero(self, event):
        for net, steps in ((self.net, self.optimizers), *zip(self.twins, self.twin_steps)):
            self.zero(event["zero"], net, steps)

    def _step(self, event):
        rows = [(self.net, self.optimizers, self.scaler), *zip(self.twins, self.twin_steps, self.twin_scalers)]
        for net, optimizers, scaler in rows:
            if event.get("clip") is not None:
                for o in optimizers if scaler is not None else ():
                    scaler.unscale_(o)
                managed = [p for name, p in net.named_parameters() if name in self.trainable]
                own = self.sync.clip_grad_norm_ if net is self.net else None
                most, kind = event["clip"], event.get("norm", 2.0)
                own(most, kind) if own is not None else torch.nn.utils.clip_grad_norm_(managed, most, kind)
            with self.autocast(event, "all"):
                for o in optimizers:
                    o.step() if scaler is None else scaler.step(o)
            if scaler is not None:
                scaler.update()
        at = self.lockstep.virtual() if self._conserves() else None
        self.lockstep.stepped(float(self.twin_steps[0][0].param_groups[0]["lr"]))
        if at is not None:
            for name, x in self.lockstep.virtual().items():
                moved = float((x - at[name]).abs().max()) if x.numel() else 0.0
                if (text := close(x, at[name], 1e-5)) is not None and moved > 1e-8:  # x and E may cancel
                    raise Mismatch(f"mean(x - E) of {name} was moved by a round: {text}")

    def _conserves(self):
        settings, floats = self.settings, {p.dtype for p in self.twins[0].parameters()}
        late, lossy = settings.fragment_sync_delay != 0, settings.codec is not None and not settings.method.has_residual
        plain = settings.outer is None and settings.fragment_update_alpha is None
        return plain and not late and not lossy and floats <= {torch.float32, torch.float64} and self._finite()

    def _finite(self):
        return all(bool(p.isfinite().all()) for net in self.twins for p in net.parameters())

    def finish(self, event):
        with torch.inference_mode() if event.get("inference") else contextlib.nullcontext():
            self.sync.finish()
        self.lockstep.finish()
        self.look()
        rows = {True: [], False: []}
        for name, p in self.net.named_parameters():
            if name not in self.ignored():
                rows[p.requires_grad].append(p)
        self.mark("weights after finish()", rows[True])
        self.mark("frozen parameters after finish()", rows[False])
        self.mark("buffers after finish()", [dict(self.net.named_buffers())[name] for name in self._averaged()])

    def outer(self, event):
        with self.sync.outer_weights():
            now = tensors_of(self.net)
            values = {name: now[name].detach().clone() for name in now if name in self.trainable}
        for name, x in self.lockstep.outer().items():
            self.check("the outer weights", name, values[name], x.to(values[name].dtype))
        self.mark("outer weights", values.values())
        self.look()

    def turns(self, event):
        """Many turns, for what is looked at only now and then."""
        for count in range(event["times"]):
            if count in event["targets"]:
                self.target(event)
            self.turn(event["turn"])

    def uneven(self, event):
        """One rank makes some more steps, but begins no further round."""
        rounds, rank = self.lockstep.rounds[event["who"]], event["who"]
        for _ in range(self.settings.sync_every - 1 - rounds.count % self.settings.sync_every):
            self.number += 1
            for net, owner in self.everyone():
                if owner != rank or (net is self.net and owner != self.rank):
                    continue
                optimizers = self.optimizers if net is self.net else self.twin_steps[rank]
                self.passed(net, rank, event, self.number)
                for o in optimizers:
                    o.step()
                self.zero("none", net, optimizers)
            rounds.stepped(0.0)

    def parts(self, event):
        """An optimizer that has a part of the weights in its state is asked for it before the last average."""
        optimizer = self.given[0] if isinstance(self.given, list) else self.given
        optimizer.eval, optimizer.param_groups[0]["train_mode"] = lambda: None, True
        try:
            self.sync.finish()
        except RuntimeError:
            return
        finally:
            del optimizer.eval, optimizer.param_groups[0]["train_mode"]
        raise Mismatch("finish() has averaged weights of which the optimizer has a part")

    def end(self):
        self.finish({})

    # --- comparisons -----------------------------------------------------------------------------------------------

    def look(self):
        twin = tensors_of(self.twins[self.rank])
        for name, x in tensors_of(self.net).items():
            self.check("the value", name, x, twin[name])

    def attached_again(self, kept, *, fresh=False):
        if kept:
            self.lockstep.statistics.attached(fresh=fresh)
            return
        own = {name: x.clone() for name, x in self.twins[1].state_dict().items() if name in self.ignored()}
        self.twins[1].load_state_dict(self.twins[0].state_dict() | own)
        self._anew()

    # --- another process -------------------------------------------------------------------------------------------

    def pack(self):
        return {key: getattr(self, key) for key in ("twins", "twin_steps", "twin_scalers", "lockstep", "settings")}

    def unpack(self, saved):
        super().unpack(saved)
        self.twin_steps = [self.through_a_file(some, net) for some, net in zip(self.twin_steps, self.twins)]
