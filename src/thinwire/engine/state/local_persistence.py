"""Convert the state of local steps to a flat dict and back, also on another number of ranks.

The codec's state is under the keys of :mod:`~thinwire.engine.state.persistence`. Besides, there are ``outer``, equal on
all ranks: outer weights and momenta, counters, means that have arrived; ``sent/<rank>``: the weights of what is under
way; and ``inside/<rank>``: the state of the method that averages gradients inside machines, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire.engine.local.rounds import Fragment
from thinwire.engine.state import persistence
from thinwire.engine.state.persistence import (
    LOCAL,
    Fitting,
    check_version,
    from_flat,
    frozen_since,
    on_device,
    to_flat,
    without,
)

if TYPE_CHECKING:
    from thinwire.engine.local_sync import LocalSync


def to_state_dict(sync: LocalSync) -> dict[str, Any]:
    """Return the state of this rank. Waits for what is under way."""
    travel = sync._travel
    buffers = [] if travel is None else travel.snapshot()
    frozen = [] if travel is None else sorted(travel.beside.names)
    outer = sync._rounds.snapshot()
    codec: dict[str, Any] = {"step": outer["count"], "dropped": 0, "residual": {}, "offset": {}}
    codec |= {"shared": {}, "local": {}}
    sent = []
    for fragment, saved in zip(sync._rounds.fragments, outer["fragments"]):
        part = saved.pop("codec")
        for kind in ("residual", "offset"):
            codec[kind] |= part[kind]
        for kind in ("shared", "local"):
            for field, named in part[kind].items():
                codec[kind].setdefault(field, {}).update(named)
        saved |= {"names": list(fragment.parameters), "rounds": part["step"], "dropped": part["dropped"]}
        sent.append(saved.pop("sent"))
    flat = to_flat(sync.services.session, {}, None, codec)
    own: dict[str, Any] = {f"sent/{sync.services.rank}": sent}
    if sync._inner is not None:
        own[f"inside/{sync.services.rank}"] = sync._inner.state_dict()
    return flat | {LOCAL: repr(sync.settings), "outer": {**outer, "buffers": buffers, "frozen": frozen}} | own


@dataclass(frozen=True)
class LocalFitting:
    """A state that was checked and fits: call ``restore``, then ``adopt``.

    Attributes:
        sync: the handle that takes it over.
        snapshot: of its rounds.
        buffers: those that came with what was under way.
        again: whether it is from another number of ranks, so that this rank starts again from the outer weights.
        inside: the state of the method inside machines, if there is one.
    """

    sync: LocalSync
    snapshot: dict[str, Any]
    buffers: list[Tensor]
    again: bool
    inside: Fitting | None

    def restore(self) -> Callable[[], None]:
        """Take the state over. Return a function that undoes it, except for the model's weights."""
        sync = self.sync
        held = [] if sync._travel is None else sync._travel.snapshot()
        sent = [] if sync._travel is None else sorted(sync._travel.beside.names)
        before = sync._rounds.snapshot()
        undo_inside = None if self.inside is None else self.inside.restore()
        self._put(self.snapshot, self.buffers, self.snapshot.get("frozen", []), self.again)  # older files lack it

        def undo() -> None:
            self._put(before, held, sent, False)
            if undo_inside is not None:
                undo_inside()

        return undo

    def _put(self, snapshot: Mapping[str, Any], buffers: list[Tensor], frozen: list[str], again: bool) -> None:
        rounds, travel = self.sync._rounds, self.sync._travel
        rounds.restore(snapshot)
        if again:
            rounds.begin_again()
        if travel is not None:
            travel.restore(buffers, frozen, merged=again)
        self.sync.services.state.step = rounds.count

    def adopt(self) -> None:
        """Put the plan inside machines in force, if one was saved. All ranks must call it."""
        if self.inside is not None:
            self.inside.adopt()


def fitting(sync: LocalSync, state: Mapping[str, Any]) -> LocalFitting:
    """Return what to take over of a state. Changes nothing.

    Raises:
        ValueError: it does not fit the model or the settings, or lacks what this rank needs.
    """
    check_version(state)
    if LOCAL not in state:
        raise ValueError(
            f"the state was saved by {state.get('method')!r}, which exchanges gradients, but here steps are local: "
            "attach with that method, or start from the saved weights"
        )
    services, rounds = sync.services, sync._rounds
    rank, same = services.rank, int(state["world_size"]) == services.topology.world_size
    if state[LOCAL] != repr(sync.settings):
        raise ValueError(
            f"the state was saved with {state[LOCAL]}, but here it is {sync.settings!r}; to change settings, call "
            "finish() before saving, and start from the saved weights"
        )
    if same and state["rank"] != rank:
        raise ValueError(
            f"the state belongs to rank {state['rank']}, but this is rank {rank}: under local steps each rank has its "
            "own, with a model and an optimizer, which thinwire.checkpoint.save keeps and "
            "torch.distributed.checkpoint does not"
        )
    if not same and sync.settings.inside is not None:
        raise ValueError(
            f"the state was saved on {state['world_size']} ranks, but with inside= the residuals belong to machines: "
            "call finish() before saving, and start from the saved weights"
        )
    frozen = frozen_since(services.model, {name for fragment in rounds.fragments for name in fragment.parameters})
    state, outer = without(state, frozen), dict(state["outer"])
    if len(outer["fragments"]) != len(rounds.fragments):
        raise ValueError("the state was saved from a model with other parameters")
    sent = state[f"sent/{rank}"] if same else [[]] * len(rounds.fragments)
    outer["fragments"] = [
        _of_trained({**saved, "sent": own}, frozen) for saved, own in zip(outer["fragments"], sent, strict=True)
    ]
    for fragment, saved in zip(rounds.fragments, outer["fragments"]):
        _check(fragment, saved)
    shapes = {name: tuple(x.shape) for fragment in rounds.fragments for name, x in fragment.parameters.items()}
    codec = on_device(from_flat(services.session, state, shapes), services.device)
    fragments = [
        {**saved, "codec": _part(codec, fragment, saved)}
        for fragment, saved in zip(rounds.fragments, outer["fragments"])
    ]
    inside = None if sync._inner is None else persistence.fitting(sync._inner, state[f"inside/{rank}"])
    return LocalFitting(sync, {**outer, "fragments": fragments}, outer["buffers"], not same, inside)


def _of_trained(saved: Mapping[str, Any], frozen: Container[str]) -> dict[str, Any]:
    """Return a saved fragment without parameters that are frozen now; all its lists go by parameter."""
    here = [place for place, name in enumerate(saved["names"]) if name not in frozen]
    return {k: [value[i] for i in here] if isinstance(value, list) and value else value for k, value in saved.items()}


def _check(fragment: Fragment, saved: Mapping[str, Any]) -> None:
    here = {name: list(x.shape) for name, x in fragment.parameters.items()}
    there = {name: list(x.shape) for name, x in zip(saved["names"], saved["anchors"], strict=True)}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"the state holds outer weights of {name} of shape {there.get(name)}, but the model's parameter has "
                f"{here.get(name)}"
            )


def _part(codec: Mapping[str, Any], fragment: Fragment, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the codec's state of one fragment's parameters."""
    names = fragment.parameters
    part: dict[str, Any] = {"step": saved["rounds"], "dropped": saved["dropped"]}
    for kind in ("residual", "offset"):
        part[kind] = {name: x for name, x in codec[kind].items() if name in names}
    for kind in ("shared", "local"):
        fields = {field: {n: x for n, x in named.items() if n in names} for field, named in codec[kind].items()}
        part[kind] = {field: named for field, named in fields.items() if named}
    return part
