"""The class :class:`KFAC`: combines hooks, plan, exchanges and inverses, before each optimizer step."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_choice, check_count, check_number, learning_rate
from thinwire.core.kernels.symmetric import pack_upper, unpack_upper
from thinwire.core.methods.decoupling import deferring
from thinwire.core.program import State
from thinwire.core.program.ops import in_own_modes, own_modes
from thinwire.engine.executors.alone import run_alone
from thinwire.engine.session import Channel
from thinwire.engine.state.scaler import loss_scale, still_scaled
from thinwire.engine.sync import GradientSync
from thinwire.systems.kfac.capture import Capture, sampled_loss
from thinwire.systems.kfac.exchange import FACTOR, UPDATES, FactorExchange, FactorRounds, decay_of
from thinwire.systems.kfac.inversion import Inverses, clip_factor, preconditioned
from thinwire.systems.kfac.layers import find_layers
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.planning import first_plan, second_plan
from thinwire.systems.kfac.stats import KFACStats, Tally
from thinwire.systems.kfac.variant import METHODS, Damping, Interval, Variant

logger = logging.getLogger("thinwire")
_VERSION = 1  # of a saved state


class KFAC:
    """Precondition the averaged gradient of every Linear and Conv2d layer with a Kronecker-factored Fisher matrix.

    ``V = G^-1 gradient A^-1`` replaces the gradient in ``.grad`` just before ``optimizer.step()``; momentum and weight
    decay then act on V. All ranks must create it, right after ``attach``; it ends with ``sync.close()``.

    Args:
        model: the attached model.
        sync: from ``thinwire.attach``; None: a single process, which must give ``optimizer``.
        damping: lambda, above 0, or a function of the step, such as :func:`~thinwire.kfac.stepped`. It matters more
            than any other option, and values do not carry over between scalings, methods or code bases: try several, as
            ``thinwire kfac tune`` does.
        kl_clip: bound on the step's length in the Fisher metric; None: no bound.
        factor_update_steps, inv_update_steps: steps between new statistics, and between inversions; or functions of the
            step.
        method: "inverse", "inverse_pi" (damping split by the factors' traces) or "eigen" (damping added to the
            products of eigenvalues: inverts the damped product exactly). With the same damping these are three
            different optimizers.
        skip_layers: names of layers to leave to the optimizer, with ``*`` and ``?``.
        optimizer: needed if there is no sync.
        variant: the schedule or a pinned plan, and what else few need.

    Raises:
        ValueError: an option, a layer or a plan is invalid or does not match; the message names it.
    """

    @in_own_modes()
    def __init__(
        self,
        model: nn.Module,
        sync: GradientSync | None,
        *,
        damping: Damping = 0.03,
        kl_clip: float | None = 1e-3,
        factor_update_steps: Interval = 10,
        inv_update_steps: Interval = 100,
        method: str = "inverse",
        skip_layers: Sequence[str] = (),
        optimizer: torch.optim.Optimizer | None = None,
        variant: Variant = Variant(),  # noqa: B008
        **moved: Any,
    ) -> None:
        _refuse_moved(moved)
        if not callable(damping):
            check_number("damping", damping, above=0)
        if kl_clip is not None:
            check_number("kl_clip", kl_clip, above=0)
        self._every = {"factor_update_steps": factor_update_steps, "inv_update_steps": inv_update_steps}
        for name, every in self._every.items():
            if not callable(every):
                check_count(name, every)
        check_choice("method", method, METHODS)
        factors, inverses = factor_update_steps, inv_update_steps
        if isinstance(factors, int) and isinstance(inverses, int) and inverses % factors:
            warnings.warn(
                f"inv_update_steps={inverses} is not a multiple of factor_update_steps={factors}: "
                f"some inverses will be made from factors that are older than necessary",
                stacklevel=2,
            )
        self._damping, self._kl_clip, self._variant = damping, kl_clip, variant
        self._optimizers = _optimizers(model, sync, optimizer)
        self._sync, self._scaler = sync, variant.scaler or (sync.services.scaler if sync is not None else None)
        self._layers, notes = find_layers(model, skip_layers, variant.max_dim)
        for note in notes:
            logger.info("thinwire: %s", note)
        self._device = self._layers[0].weight.device
        self._ranks = sync if sync is not None and sync.services.topology.world_size > 1 else None  # None: one process
        shapes = tuple(layer.shape for layer in self._layers)
        first, costs = first_plan(self._ranks, shapes, variant, method, self._device, self._facts())
        # kept until the plan is made once more, from measured times; KAISA's messages depend on none
        self._costs = costs if first.workers == first.world_size else None
        rank = self._ranks.services.rank if self._ranks is not None else 0
        self._state = State(rank, first.topology)
        self._inverses = Inverses(first, self._state, rank)
        if self._ranks is None:
            self._channel = Channel(None, first.topology, "kfac", {})
        else:
            self._channel = self._ranks.services.channel("kfac", first.depth(), first.topology)
        self._tally = Tally(self._channel)
        mine = [self.plan.exchange or self.plan.mine(i, rank) for i in range(len(self._layers))]
        self._sampled = variant.fisher == "sampled"
        self._capture = Capture(
            model, self._layers, mine, variant.scaling, variant.positions, sampled=self._sampled, listener=self
        )
        program = FactorExchange(
            decay_of(variant.factor_decay), torch.bfloat16 if self.plan.wire_dtype == "bf16" else None
        )
        self._rounds = FactorRounds(
            self.plan, self._channel, self._state, program, self._capture.statistic, self._device
        )
        if variant.warm_start is not None:
            self._rounds.identity()
        self._blank = variant.warm_start is None  # no statistics yet
        self._active = not self.plan.exchange  # preconditioning has begun
        self._count = 0  # passes, if the engine does not count them
        self._shift = -self._ranks.services.state.step if self._ranks is not None else 0
        self._stepped = self._next = 0  # passes already used by a step; pass from which inverses are due
        # fisher_backward must still be called; there is a gradient that no step has used
        self._wanting = self._touched = False
        self._handles: list[Any] = [
            layer.weight.register_post_accumulate_grad_hook(self._touch) for layer in self._layers
        ]
        if variant.auto_step:
            self._handles += [o.register_step_pre_hook(self._before_step) for o in self._optimizers]
        if sync is not None:
            sync.services.companions["kfac"] = self

    def _facts(self) -> dict[str, Any]:
        v = self._variant
        facts = {"scaling": v.scaling, "tokens": v.positions, "fisher": v.fisher, "factor_decay": v.factor_decay}
        return {**facts, **{name: self._every_at(name, 0) for name in self._every}, "kl_clip": self._kl_clip}

    def _every_at(self, name: str, step: int) -> int:
        every = self._every[name]
        return check_count(f"{name}({step})", every(step)) if callable(every) else every

    @property
    def plan(self) -> KFACPlan:
        """The plan in use: once times are measured, its messages may change."""
        return self._inverses.plan

    def _adopt(self, plan: KFACPlan) -> None:
        self._inverses.plan = plan
        self._rounds.adopt(plan)

    # --- calls from the hooks ---------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Number of synchronised backward passes so far."""
        return self._count if self._ranks is None else self._ranks.services.state.step + self._shift

    def due(self) -> bool:
        return self._blank or self.passes % self._every_at("factor_update_steps", self.passes) == 0

    def last_pass(self) -> bool:
        """Return whether the current pass is the last of its step; without a sync only ``step`` can know this."""
        return self._sync is not None and self._sync.services.synchronizing

    def begin_round(self) -> None:
        self._take_in()
        self._rounds.begin()
        self._wanting = self._sampled

    def complete(self, layer: int, side: int) -> None:
        self._rounds.complete(layer, side)

    def end_round(self) -> None:
        self._rounds.end()

    def loss_scale(self) -> Tensor | None:
        return loss_scale(self._scaler, self._device)

    def _touch(self, _: Tensor) -> None:
        self._touched = True

    # --- a step ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if still_scaled(self._scaler, optimizer):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() on gradients that still carry the loss scale, which K-FAC cannot "
                "precondition: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        self.step()

    def step(self) -> None:
        """Precondition the gradients in ``.grad``, once per averaged backward; the optimizers call this.

        All ranks must call it, after backward and before ``optimizer.step()``.

        Raises:
            RuntimeError: ``fisher="sampled"``, and ``fisher_backward`` was not called in a pass that needed it; or no
                layer was seen in the first pass.
        """
        with own_modes(), torch.no_grad():
            self._step()

    def _step(self) -> None:
        if not (self._touched if self._ranks is None else self.passes > self._stepped):
            return
        self._touched = False
        if self._wanting:
            raise RuntimeError(
                'fisher="sampled" needs kfac.fisher_backward(outputs, distribution) between forward and '
                "loss.backward(), on every step; on steps that need no statistic it does nothing"
            )
        index = self._count if self._ranks is None else self.passes - 1
        if self._capture.blind and (self._blank or index % self._every_at("factor_update_steps", index) == 0):
            raise RuntimeError(
                "K-FAC has seen no call of any layer, so it would do nothing: a model that was compiled and called "
                "earlier does not run new hooks (call torch._dynamo.reset() after making KFAC), and layers are watched "
                "in training mode only"
            )
        self._count, self._stepped = self._count + 1, self.passes
        self._capture.close()
        self._take_in()
        if self._costs is not None and self._ranks is not None and self._capture.measured:
            costs, self._costs = self._costs, None
            self._adopt(second_plan(self.plan, self._ranks, self._variant, costs, self._capture))
        damping = self._damping(index) if callable(self._damping) else self._damping
        damping = check_number(f"damping({index})", damping, above=0)
        if not self._blank and index >= self._next:
            every = self._every_at("inv_update_steps", index)
            self._next = (index // every + 1) * every
            run = self._ranks.services.run if self._ranks is not None else run_alone
            self._tally.phase("inverses", lambda: self._inverses.update(damping, self._channel, run))
            self._tally.inverse_updates += 1
            self._active = True
        if self._active:
            self._tally.phase("returns", lambda: self._precondition(damping))

    def _take_in(self) -> None:
        self._tally.phase("factors", self._rounds.drain)
        if self._blank:
            self._blank = self._rounds.blank()

    def _precondition(self, damping: float) -> float:
        gradients = {i: g for i, layer in enumerate(self._layers) if (g := layer.gradient()) is not None}
        found, waited = preconditioned(gradients, self._inverses, self._state, self._channel, damping)
        clip = self._tally.clip = None
        if self._kl_clip is not None and found:
            group = {id(p): (o, g) for o in self._optimizers for g in o.param_groups for p in g["params"]}
            owners = [group.get(id(layer.weight)) for layer in self._layers]
            rates = [0.0 if owner is None else learning_rate(*owner, "kl_clip") for owner in owners]
            clip = self._tally.clip = clip_factor(found, gradients, rates, self._kl_clip)
        for dtype in {v.dtype for v in found.values()}:
            layers = {i: v for i, v in found.items() if v.dtype == dtype}
            if clip is not None:
                layers = dict(zip(layers, torch._foreach_mul([*layers.values()], clip.to(dtype))))
            parts = [part for i, v in layers.items() for part in self._layers[i].parts(v)]
            torch._foreach_copy_([grad for grad, _ in parts], [x for _, x in parts])
        self._tally.steps += 1
        return waited

    def fisher_backward(self, outputs: Tensor, distribution: str, generator: torch.Generator | None = None) -> None:
        """With ``fisher="sampled"``: sample targets from the model's output, and take the statistics G from their loss.

        Call it between forward and ``loss.backward()``, in every step (and micro-batch). It does not change ``.grad``.

        Args:
            outputs: of this forward, with their graph.
            distribution: "categorical" (logits, classes last) or "gaussian" (means, unit variance).
            generator: ranks must draw different samples.
        """
        if not self._sampled:
            raise RuntimeError(
                'fisher_backward is for KFAC(..., variant=Variant(fisher="sampled")); "empirical" uses the loss itself'
            )
        if not self._capture.open:
            return
        self._capture.sample(sampled_loss(outputs, distribution, generator))
        self._wanting = False

    # --- state -----------------------------------------------------------------------------------------------------

    def stats(self) -> KFACStats:
        levels = {name: level for name, level in self._inverses.levels.items() if level}
        return self._tally.stats(self.plan, self._rounds.updates, self._capture.seconds, levels)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Not between micro-batches. The sync's state, and so its checkpoints, include it.

        Raises:
            RuntimeError: the last backward of a step is not over yet.
        """
        if self._capture.open:
            raise RuntimeError("K-FAC has seen part of a step: save after optimizer.step(), not between micro-batches")
        self._take_in()
        saved: dict[str, Any] = {"version": _VERSION, "plan": self.plan.to_json(), "passes": self.passes}
        saved |= {"next_inversion": self._next, "active": self._active, **self._fitting()}
        saved |= {f"{field}/{name}": value.detach().clone() for (field, name), value in self._state.fields.items()}
        for name, inverse in self._inverses.of.items():
            saved[f"inverse/{name}"] = inverse.clone() if self.plan.method == "eigen" else pack_upper(inverse)
        return saved

    def _fitting(self) -> dict[str, str]:
        """Return the options that must match when a state is loaded; a state holds no others, nor the damping."""
        return {"scaling": self._variant.scaling, "tokens": self._variant.positions}

    @in_own_modes()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``: bit for bit with the same plan; with another number of ranks only factors are kept.

        Raises:
            ValueError: it does not match the model or the scaling, or lacks what this rank needs.
        """
        if state.get("version") != _VERSION:
            raise ValueError(f"this is not a K-FAC state of version {_VERSION}; it says {state.get('version')!r}")
        for name, value in self._fitting().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the K-FAC state was saved with {name}={state.get(name)!r} but this is {name}={value!r}: factors "
                    "of one do not fit the other"
                )
        saved = KFACPlan.from_json(state["plan"])
        whole = self._load_tensors(state, saved)
        self._follow(saved)
        self._next = int(state["next_inversion"]) if whole else 0
        self._active = not self.plan.exchange or (bool(state["active"]) and whole)
        self._count, self._shift = int(state["passes"]), self._shift + int(state["passes"]) - self.passes
        self._stepped, self._blank = self.passes, self._rounds.blank()

    def _load_tensors(self, state: Mapping[str, Any], saved: KFACPlan) -> bool:
        """Load factors and inverses. Return whether all inverses are there; if not, they must be computed again."""
        plan, rank = self.plan, self._state.rank
        if saved.layers != plan.layers:
            differ = sorted({x.name for x in {*saved.layers} ^ {*plan.layers}})
            raise ValueError(f"the K-FAC state has other layers than the model: see {', '.join(differ[:3])}")
        every = range(len(plan.owners))
        needed = [plan.factor(i) for i in every if plan.exchange or plan.mine(i // 2, rank)]
        missing = [name for name in needed if f"factor/{name}" not in state]
        if missing and any(key.startswith("factor/") for key in state):
            raise ValueError(
                f"the K-FAC state lacks the factor {missing[0]}: save with thinwire.checkpoint.save, which keeps those "
                "of every rank"
            )
        self._state.drop_step()
        factors = {
            (field, name): state[f"{field}/{name}"].to(self._device, copy=True)
            for name in needed
            for field in (FACTOR, UPDATES)
            if f"{field}/{name}" in state
        }
        self._state.fields.clear()
        self._state.fields.update(factors)
        found: dict[str, Tensor] = {}
        if saved.method == plan.method:
            for name in map(plan.factor, every):
                if (row := state.get(f"inverse/{name}")) is not None:
                    row = row.to(self._device)
                    found[name] = row.clone() if plan.method == "eigen" else unpack_upper(row)
        held = {plan.factor(i) for i in every if plan.mine(i // 2, rank)}
        self._inverses.of = {name: inverse for name, inverse in found.items() if name in held}
        same = (saved.world_size, saved.owners, saved.method) == (plan.world_size, plan.owners, plan.method)
        return same or len(found) == len(plan.owners)

    def _follow(self, saved: KFACPlan) -> None:
        """Keep a saved plan's messages if the number of ranks is the same: sums of other messages round differently."""
        same = replace(self.plan, a_buckets=saved.a_buckets, g_buckets=saved.g_buckets)
        if self._costs is not None and same == saved:
            self._costs = None
            self._adopt(same)

    def close(self) -> None:
        """Remove the hooks; the optimizer then steps with plain gradients. Idempotent, on each rank separately."""
        self._capture.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._channel.close()
        if self._sync is not None and self._sync.services.companions.get("kfac") is self:
            del self._sync.services.companions["kfac"]

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _optimizers(
    model: nn.Module, sync: GradientSync | None, optimizer: torch.optim.Optimizer | None
) -> tuple[torch.optim.Optimizer, ...]:
    if sync is None:
        if optimizer is None:
            raise ValueError("without a sync K-FAC needs the optimizer: KFAC(model, None, optimizer=optimizer, ...)")
        return (optimizer,)
    if sync.services.model is not model:
        raise ValueError("the sync belongs to another model: give KFAC the model that was attached")
    method = sync.services.method
    if deferring(method) is not None:
        raise ValueError(
            f"{method.name} with decoupled updates delivers gradients in parts, after the step; K-FAC needs them "
            'whole before it: attach with "ssgd" or another method without decoupled=True'
        )
    if "kfac" in sync.services.companions:
        raise RuntimeError("this model already has a KFAC: call close() on it first")
    return sync.services.optimizers if optimizer is None else (optimizer,)


def _refuse_moved(options: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(Variant)}
    for name in options:
        if name not in known:
            raise TypeError(f"KFAC has no option {name!r}")
        raise TypeError(f"{name}= is an option of Variant: give KFAC(model, sync, variant=Variant({name}=...))")
