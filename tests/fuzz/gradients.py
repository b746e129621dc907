"""Scripts under methods that average gradients: LocalWorld beside the ranks, and one optimizer for both twins."""

import contextlib
import functools

import torch
from torch import nn

import thinwire as tw
from fuzz.models import loss_of
from fuzz.player import Mismatch, Player, difference, optimizers_of, put, scaler_of, tensors_of
from thinwire.core.methods.start import exact_method, start_method
from thinwire.core.program import LocalWorld, Method, Plan, PlanBucket, State, Topology
from thinwire.engine.parameters import managed_parameters


class Held(State):
    """What a step stages waits until the script's optimizer has used the gradients."""

    hold = True

    def end_step(self, *, hold=False):
        return super().end_step(hold=self.hold)


class Mixed(Method):
    """Each bucket by what it runs: the method, what begins in its place, or what is kept dense."""

    name = "mixed"

    def __init__(self, method, dense, start):
        self.method, self.dense, self.first = method, exact_method(method), start
        self.kept_dense, self.entries = dense, ()

    def of(self, names, state):
        if set(names) <= self.kept_dense:
            return self.dense
        return self.first if state.step < state.start else self.method

    def reduce(self, bucket, state):
        chosen = self.of([slot.name for slot in bucket.slots], state)
        return self.entries[bucket.index].applied(chosen).reduce(bucket, state)


class World:
    """What both ranks' gradients become, and their residuals."""

    def __init__(self, net, method, attach):
        asked, self.find_unused = attach.get("start_compression_step"), attach.get("find_unused_parameters", False)
        topology = Topology(2, 1 if attach.get("apart") else 2)
        keep = attach.get("keep_dense", "auto")
        found = managed_parameters(net, method, keep)
        self.shapes = {m.name: m.shape for m in found}
        self.mixed = Mixed(method, {m.name for m in found if m.dense}, start_method(method, topology, asked))
        self.world = LocalWorld(2, topology.layout)
        zeros = {m.name: torch.zeros(m.shape, dtype=m.parameter.grad_dtype or m.dtype) for m in found}
        self.world.step(tw.SSGD(), [zeros, zeros])  # it knows a parameter's kind from its first gradient
        self.world.states = [Held(rank, topology) for rank in range(2)]
        for state in self.world.states:
            state.start = method.start_steps if asked is None else asked

    @property
    def states(self):
        return self.world.states

    def step(self, plan, gradients, *, hold):
        """The averages by name; None for what no rank used, where that can be known."""
        state = self.states[0]
        entries = plan.buckets(state.turn)
        self.world.plan = Plan((tuple(PlanBucket(e.names, kept=e.kept) for e in entries),))
        self.mixed.entries = entries
        chosen = {name: self.mixed.of([name], state) for name in self.shapes}
        for one in self.states:
            one.hold = hold
        unused = [name for name in self.shapes if all(g[name] is None for g in gradients)]
        given = [{name: g[name] for name in self.shapes} for g in gradients]
        out = self.world.step(self.mixed, given)[0]
        for name in unused:
            if self.find_unused or chosen[name].sums(self.shapes[name]):
                out[name] = None
        return out


class Gradients(Player):
    """A script whose gradients are averaged."""

    def begin_twins(self):
        self.twin_steps, _ = optimizers_of(self.case, self.twins[0])
        self.own_steps, _ = optimizers_of(self.case, self.twins[1])  # of what each rank keeps to itself
        self.twin_scaler = scaler_of(self.case)
        self.world = None

    def twin_optimizers(self):
        return [*self.twin_steps, *self.own_steps]

    def attach(self, **options):
        self.chosen = tw.method(self.case["method"], **self.options)
        if (parts := self.case.get("plan")) is not None:
            options["plan"] = self._pinned(parts)
        super().attach(**options)
        self.trainable = {name for name, p in self.net.named_parameters() if p.requires_grad}
        self.after_attach()
        if self.world is None:
            self.world = World(self.net, self.chosen, self.case.get("attach", {}) | {"keep_dense": self.keep_dense})

    def after_attach(self):
        """What ``attach`` does to the twins too, and what a new handle does not know any more."""
        names = tensors_of(self.twins[0])
        with torch.no_grad():
            for name, x in tensors_of(self.twins[1]).items():
                own = name.removeprefix("buffer ") in self.ignored()
                if difference(x, names[name]) is not None and not own:
                    put(x, names[name])
        self.seen, self.drops, self.followed, self.waiting = bool(self.case.get("no optimizer")), 0, None, set()
        self.first = {name: b.clone() for name, b in self.twins[0].named_buffers()}

    def _pinned(self, parts):
        """A plan that cuts the parameters at random places, by dtype and by whether they are kept dense."""
        draw = torch.Generator().manual_seed(parts)
        kinds = {}
        keep = {"short": lambda n, p: p.numel() < 40, "all": lambda n, p: True}
        rule = self.case.get("attach", {}).get("keep_dense", "auto")
        for m in managed_parameters(self.net, self.chosen, keep.get(rule, rule)):
            kinds.setdefault((m.dense, m.parameter.grad_dtype or m.dtype), []).append(m.name)
        buckets = []
        for (dense, _), names in kinds.items():
            begin = 0
            while begin < len(names):
                end = begin + int(torch.randint(1, 5, (), generator=draw))
                buckets.append(PlanBucket(tuple(names[begin:end]), dense))
                begin = end
        return Plan((tuple(buckets),) * self.chosen.phases)

    # --- a turn ----------------------------------------------------------------------------------------------------

    @property
    def decoupled(self):
        return self.chosen.decoupled

    def turn(self, event):
        """Passes, an exchange, and what the script makes of the averages."""
        self.rate(event, [*self.optimizers, *self.twin_optimizers()])
        self.exchange(event)
        if event["end"] == "sam":
            self._climb(event)
        if event["end"] == "drop":
            pass
        elif self.case.get("no optimizer"):
            self._plain_update()
        else:
            self._unscale_and_clip(event)
            self._step(event)
        if self.ignored():
            self._own_steps(event)
        self.zero(event["zero"], self.net, self.optimizers)
        late = self.decoupled and not self.options.get("update_in_step")  # no .grad is left for zero_grad
        self.zero("none" if late else event["zero"], self.twins[0], self.twin_steps)
        self._level()
        for p, q in self._shared():
            q.grad = None if p.grad is None else p.grad.clone()
        if event.get("look", True):
            self.look()

    def _shared(self):
        """Pairs of both twins' parameters, but for those that each rank keeps to itself."""
        rows = zip(self.twins[0].named_parameters(), self.twins[1].parameters())
        return [(p, q) for (name, p), q in rows if name not in self.ignored()]

    def _own_steps(self, event):
        """The other twin's steps, of what each rank keeps to itself; it has no others' gradients."""
        grads = [(q, q.grad) for _, q in self._shared()]
        for q, _ in grads:
            q.grad = None
        if event["end"] != "drop":
            for o in self.own_steps:
                o.step()
        self.zero(event["zero"], self.twins[1], self.own_steps)
        for q, grad in grads:
            q.grad = grad

    def exchange(self, event):
        """All passes of a turn, until the averages are there."""
        last = event.get("last", "backward")
        for micro in range(event.get("micro", 0) + 1):
            self.number += 1
            final = micro == event.get("micro", 0)
            plan = self.sync.plan  # the next one may be made from this backward
            for net, rank in self.everyone():
                apart = net is self.net and (not final or last != "backward")
                with self.sync.no_sync() if apart else contextlib.nullcontext():
                    scaler = self.scaler if net is self.net else self.twin_scaler
                    by_hand = last == "by hand" and final
                    self.passed(net, rank, event, self.number, by_hand=by_hand, scaler=scaler)
        if last != "backward":
            with self.autocast(event, "all"):
                self.sync.synchronize()
        self._deliver(plan, exactly=not event.get("loose"))

    def _deliver(self, plan, *, exactly=True):
        states, scale = self.world.states, self._scale()
        if states[0].pending:
            self.drops += 1
            for state in states:
                state.drop_pending()
        given = []
        for net in self.twins:
            parameters = dict(net.named_parameters())
            rows = {name: parameters[name] for name in self.world.shapes}
            some = {n: p.grad if p.requires_grad and p.grad is not None else None for n, p in rows.items()}
            given.append({n: None if g is None else g.detach() / scale for n, g in some.items()})
        frozen = {name for name, p in self.twins[0].named_parameters() if not p.requires_grad}
        for state in states:
            state.held = frozen
        self.hold = self.seen or self.drops < 3
        out = self.world.step(plan, given, hold=self.hold)
        out = {name: None if x is None else x * scale for name, x in out.items()}
        self._check_exact(given, out, scale)
        real = dict(self.net.named_parameters())
        for name, wanted in out.items():
            if not real[name].requires_grad:
                continue
            if not self.decoupled:
                grad = real[name].grad
                if (grad is None) != (wanted is None) and real[name].numel() == 0:
                    pass  # whether nothing was used cannot be told
                else:
                    self.check("the average", name, grad, wanted, 0.0 if exactly else 1e-6)
                    if grad is not None and grad.numel() and grad.stride() != real[name].stride():
                        raise Mismatch(f"the strides of {name}: {grad.stride()} instead of {real[name].stride()}")
                wanted = grad
            for net in self.twins:
                p = dict(net.named_parameters())[name]
                p.grad = None if wanted is None else torch.empty_like(p, dtype=wanted.dtype).copy_(wanted)
        self._follow()

    def _check_exact(self, given, out, scale):
        if not self.chosen.exact:
            return
        for name, x in out.items():
            some = [g[name] for g in given if g[name] is not None]
            if x is not None and some:
                mean = (sum(g.double() for g in some) / 2 * scale).to(x.dtype)
                self.check("the plain average", name, x, mean, 1e-6 if x.dtype.itemsize > 2 else 0.01)

    def _scale(self):
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def _follow(self):
        """Buffers that change become rank 0's, with an exchange; those that never change are equal anyway."""
        if not self.case.get("attach", {}).get("broadcast_buffers", True):
            return
        ours, theirs = (dict(net.named_buffers()) for net in self.twins)
        if self.followed is None:
            changed = [n for n, b in self.first.items() if any(difference(x[n], b) for x in (ours, theirs))]
            norms = [name for name, m in self.twins[0].named_modules() if isinstance(m, nn.BatchNorm1d)]
            self.followed = {*changed, *(n for n in ours if n.rpartition(".")[0] in norms)}
        self.followed -= {*self.ignored()}
        for name in self.followed:
            put(theirs[name], ours[name])

    def _unscale_and_clip(self, event):
        if (most := event.get("clip")) is None:
            return
        if self.scaler is not None:
            for o in self.optimizers:
                self.scaler.unscale_(o)
            for o in self.twin_steps:
                self.twin_scaler.unscale_(o)
        kind = event.get("norm", 2.0)
        managed = [p for name, p in self.twins[0].named_parameters() if name in self.world.shapes]
        held = [p.grad for p in managed if p.grad is not None]
        before = {name: p.grad for name, p in self.twins[0].named_parameters() if p.grad is not None}
        with self.autocast(event, "all"):
            norm = self.sync.clip_grad_norm_(most, kind)
        wanted = torch.stack([g.double().norm(kind) for g in held if g.numel()]).norm(kind)
        short = all(g.dtype.itemsize == 2 for g in held)
        if not torch.isfinite(wanted):
            return
        self.check("the norm", "all", norm.double(), wanted, 0.01 if short else 1e-4)
        factor = min(1.0, most / (float(wanted) + 1e-6))
        for name, p in self.net.named_parameters():
            if (g := before.get(name)) is None or name not in self.world.shapes:
                continue
            twin = dict(self.twins[0].named_parameters())[name]
            if self.decoupled:
                twin.grad.mul_(factor)
                self.loose = True
            else:
                self.check("the clipped average", name, p.grad, g * factor, 1e-4 if g.dtype.itemsize > 2 else 0.02)
                twin.grad.copy_(p.grad)

    def _step(self, event):
        used = set()
        for o in self.twin_steps:
            for p in (p for group in o.param_groups for p in group["params"]):
                used |= {n for n, q in self.twins[0].named_parameters() if q is p and p.requires_grad}
        for name, p in self.twins[0].named_parameters():
            if p.grad is None and (not self.decoupled or self.world.find_unused):
                used.discard(name)
        finite = all(bool(p.grad.isfinite().all()) for p in self.twins[0].parameters() if p.grad is not None)
        for optimizers, scaler in ((self.optimizers, self.scaler), (self.twin_steps, self.twin_scaler)):
            with self.autocast(event, "all"):
                for o in optimizers:
                    o.step() if scaler is None else scaler.step(o)
            if scaler is not None:
                scaler.update()
        if self.scaler is not None and self.scaler.get_scale() != self.twin_scaler.get_scale():
            self.check("the loss scale", "all", *(torch.tensor(s.get_scale()) for s in (self.scaler, self.twin_scaler)))
        if self.scaler is None or finite:
            self.seen = True
            for state in self.world.states:
                state.commit(used & set(self.world.shapes))

    @torch.no_grad()
    def _plain_update(self):
        for net in (self.net, self.twins[0]):
            for p in net.parameters():
                if p.grad is not None and p.requires_grad:
                    p.data.add_(p.grad, alpha=-0.05)
        for state in self.world.states:
            state.commit(set(self.world.shapes))

    def _climb(self, event):
        """SAM: to where the loss is higher, another exchange there, and back; the first gradients are not used."""
        kept = []
        with torch.no_grad():
            for net in (self.net, *self.twins):
                own = [p for p in net.parameters() if p.requires_grad and p.grad is not None]
                kept.append([(p, p.detach().clone()) for p in own])
                for p in own:
                    p.add_(p.grad, alpha=0.05)
        for net, optimizers in ((self.net, self.optimizers), (self.twins[0], self.twin_steps)):
            self.zero(event["zero"], net, optimizers)
        for p, q in zip(*(net.parameters() for net in self.twins)):
            q.grad = None if p.grad is None else p.grad.clone()
        self.exchange(event)
        for some in kept:
            for p, value in some:
                p.data.copy_(value)

    def closure(self, event):
        """LBFGS: several exchanges in one ``step``; for exact methods, on a loss without chance."""
        self.number += 1

        def evaluate(net, optimizer, average):
            optimizer.zero_grad()
            loss = loss_of(net, self.case, self.rank if average is None else 0, self.number)
            loss.backward()
            if average is not None:
                average()
            return loss

        def average():
            self._level()
            self.zero("by hand", self.twins[1], ())
            loss_of(self.twins[1], self.case, 1, self.number).backward()
            for p, q in zip(*(net.parameters() for net in self.twins)):
                some = [x.grad / 2 for x in (p, q) if x.grad is not None]
                p.grad = sum(some) if some else None
            self._follow()

        for net, after in ((self.net, None), (self.twins[0], average)):
            optimizer = torch.optim.LBFGS([p for p in net.parameters() if p.requires_grad], lr=0.1, max_iter=3)
            optimizer.step(functools.partial(evaluate, net, optimizer, after))
        for net, optimizers in ((self.net, self.optimizers), *((net, self.twin_steps) for net in self.twins)):
            self.zero("by hand", net, optimizers)
        self._level()
        self.look()

    @torch.no_grad()
    def _level(self):
        for p, q in self._shared():
            q.copy_(p)

    # --- comparisons -----------------------------------------------------------------------------------------------

    def settle(self):
        if self.decoupled:
            self.sync.synchronize()

    def interrupted(self, begun):
        states = self.world.states
        for state in states:
            if begun:
                state.drop_pending()

    def attached_again(self, kept, *, fresh=False):
        if not kept:
            self.world = World(self.net, self.chosen, self.case.get("attach", {}) | {"keep_dense": self.keep_dense})
        for state in self.world.states:
            state.restore(state.snapshot())
        self.world.shapes = {n: s for n, s in self.world.shapes.items() if n in self.trainable}

    @torch.no_grad()
    def look(self):
        """Compare everything."""
        self.settle()
        twins = [tensors_of(net) for net in self.twins]
        for name, x in tensors_of(self.net).items():
            wanted = twins[self.rank if name.startswith("buffer ") or name in self.ignored() else 0][name]
            self.check("the value", name, x, wanted, (1e-4 if x.dtype.itemsize > 2 else 0.02) if self.loose else 0.0)
            if self.loose and not name.startswith("buffer "):
                for net in twins:
                    net[name].copy_(x)
        self.mark("weights", [p for name, p in self.net.named_parameters() if name not in self.ignored()])
        if self.case.get("attach", {}).get("broadcast_buffers", True) and self.followed is not None:
            buffers = dict(self.net.named_buffers())
            self.mark("buffers", [buffers[name] for name in sorted(self.followed)])
        if self.chosen.has_residual:
            self._look_at_residuals()

    def _look_at_residuals(self):
        saved = self.sync.state_dict()
        snapshot, prefix = self.world.states[self.rank].snapshot(), f"residual/{self.rank}/"
        if saved["step"] != snapshot["step"]:
            self.check("the step", "the state", torch.tensor(saved["step"]), torch.tensor(snapshot["step"]))
        for name in self.world.shapes:
            real, wanted = saved.get(prefix + name), snapshot["residual"].get(name)
            some = real if wanted is None else wanted
            if (real is not None and wanted is not None) or (some is not None and some.any()):
                self.check("the residual", name, real, wanted, 1e-4 if self.loose else 0.0)

    # --- another process -------------------------------------------------------------------------------------------

    def pack(self):
        return {
            key: getattr(self, key) for key in ("twins", "twin_steps", "own_steps", "twin_scaler", "world", "loose")
        }

    def unpack(self, saved):
        super().unpack(saved)
        for (name, x), y in zip(self.twins[0].named_buffers(), self.twins[1].buffers()):
            if name not in self.ignored() and self.case.get("attach", {}).get("broadcast_buffers", True):
                put(y, x)  # model.pt is rank 0's
        self.twin_steps = self.through_a_file(self.twin_steps, self.twins[0])
        self.own_steps = self.through_a_file(self.own_steps, self.twins[1])
