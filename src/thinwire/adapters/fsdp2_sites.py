"""Local steps between sites, each with the model sharded over its ranks: for models larger than a card.

Every rank exchanges its own shards with the ranks that hold the same shards at other sites, so as many streams cross
the thin wire as a site has ranks. A shard is a parameter like another to the rounds of ``engine/local``; what is
decided from values or times, a site's ranks decide together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_together
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thinwire.adapters.fsdp2_groups import across
from thinwire.core.kernels.runs import here
from thinwire.core.program import Topology
from thinwire.core.program.state import extend
from thinwire.engine.attach import attach_local, check_model
from thinwire.engine.local.settings import Local
from thinwire.engine.local.site import Site
from thinwire.engine.local.sync import LocalSync
from thinwire.engine.parameters import DenseRule, Managed, check_optimizers, managed_parameters
from thinwire.engine.services import fitting
from thinwire.engine.source import AttachSettings
from thinwire.engine.state.persistence import name_of

_FACTS = "facts"
_PARTS = ("anchors", "momenta", "slow", "mean")  # of a fragment's state, equal at all sites
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class SiteSync(LocalSync):
    """The handle of ``thinwire.adapters.fsdp2.attach(..., sites=)``: a ``LocalSync`` of this rank's shards.

    It is saved by :meth:`save`, whose files have these keys, all by parameter: ``outer/<part>``, equal at all sites;
    ``site<k>/weights``, ``optimizer``, ``residual`` and ``sent``, of each; and below them ``<i>of<n>``, what belongs
    to one shard and cannot be cut otherwise.
    """

    _quiet = False

    @property
    def _at(self) -> str:
        """Return which of its site's shards this rank has."""
        assert self.services.site is not None
        return self.services.site.place

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """A fresh optimizer makes a step without gradients where its state is asked for, which does not count."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._quiet:
            super()._watch(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._quiet:
            super()._stepped(optimizer)

    def _own(self) -> dict[str, Any]:
        """Return this site's weights and the states of its optimizers, not copied, and of this rank its buffers."""
        model = self.services.model
        with self._unwatched():
            states = get_optimizer_state_dict(model, self.services.optimizers, options=_FLAT)
        found: dict[str, Any] = {f"optimizer/{key}": value for key, value in states.items()}
        found |= {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
        return found | {f"{self._at}/buffer/{name}": x for name, x in model.named_buffers()}

    def save(self, directory: str | Path) -> None:
        """Save all that training continues from, weights and optimizers too, by ``torch.distributed.checkpoint``.

        All ranks of all sites must call it. A model for others is what ``outer_weights()`` lends.
        """
        flat, rank, parameters = self.state_dict(), self.services.rank, self._here()
        self._changed()
        outer, sent, site = flat.pop("outer"), flat.pop(f"sent/{rank}"), f"site{rank}"
        saved = {f"{site}/{key}": value for key, value in self._own().items()}
        saved |= {f"{site}/{self._at}/under way/{i}": x for i, x in enumerate(outer.pop("buffers"))}
        told, facts = [], {}
        for one, own in zip(outer.pop("fragments"), sent, strict=True):
            names, averaged = one.pop("names"), one["mean"] is not None
            parts = {f"outer/{part}": one.pop(part) or [] for part in _PARTS} | {f"{site}/sent": own}
            told.append(one | {"averaged": averaged})
            for part, tensors in parts.items():
                saved |= {f"{part}/{n}": sharded_as(parameters[n], x) for n, x in zip(names, tensors)}
        for key, value in flat.items():
            kind, _, rest = key.partition("/")
            if kind == "residual":
                name, begin = name_of(key), flat.get(key.replace(kind, "offset", 1))
                whole = value if begin is None else extend(value, begin, here(parameters[name]).shape)
                saved[f"{site}/residual/{name}"] = sharded_as(parameters[name], whole)
            elif kind in ("shared", "local"):
                owner = "outer" if kind == "shared" else site
                saved[f"{owner}/{self._at}/{kind}/{rest.removeprefix(f'{rank}/')}"] = value
            elif kind not in ("offset", "rank"):
                facts[key] = value
        facts["outer"] = outer | {"fragments": told}
        saved[_FACTS] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        save_together(saved, checkpoint_id=directory)

    def load(self, directory: str | Path) -> None:
        """Continue from what :meth:`save` has written: on as many sites and shards, bit for bit.

        All ranks of all sites must call it. On another number of shards, what belongs to one shard alone is left out:
        factors of low-rank codecs, which are drawn again, and buffers. On another number of sites, all begin with the
        outer weights, the first site's optimizer states and the mean of the residuals.

        Raises:
            ValueError: it was saved with other settings or from another model; nothing has changed.
        """
        self._check_own("load()")
        reader = FileSystemReader(directory)
        known: dict[str, Any] = reader.read_metadata().state_dict_metadata
        if _FACTS not in known:
            raise ValueError(f"{directory} holds no checkpoint of SiteSync.save")
        told = {_FACTS: torch.empty(known[_FACTS].size, dtype=torch.uint8)}
        load_together(told, storage_reader=reader)
        facts = json.loads(bytes(told[_FACTS].tolist()))
        facts["rank"] = rank = self.services.rank
        same = self._check_fits(facts)
        own, parameters, mine = self._own(), self._here(), f"site{rank if same else 0}"
        for key, value in own.items():
            about = known.get(f"{mine}/{key}")
            if key.startswith("weights/") and (about is None or about.size != value.shape):
                raise ValueError(f"{directory} was saved from another model: its {key.partition('/')[2]} differs")
        wanted: dict[str, Any] = {}
        for key, about in known.items():
            owner, _, rest = key.partition("/")
            kind, _, name = rest.partition("/")
            if owner == mine and rest in own:
                wanted[key] = own[rest]
            elif kind == self._at and owner in ("outer", mine):
                wanted[key] = torch.empty(about.size, dtype=about.properties.dtype)
            elif name in parameters and (owner in ("outer", mine) or kind == "residual"):
                p = parameters[name]
                room = torch.zeros(here(p).shape, dtype=about.properties.dtype, device=p.device)
                wanted[key] = sharded_as(p, room)
        load_together(wanted, storage_reader=reader)
        self._take(facts, wanted, mine)

    def _take(self, facts: dict[str, Any], saved: dict[str, Any], mine: str) -> None:
        rank, outer, flat = self.services.rank, dict(facts["outer"]), {k: v for k, v in facts.items() if k != "outer"}
        flat["outer"], sent = outer, []
        outer["measured"] = None if outer["measured"] is None else tuple(outer["measured"])

        def tensors(part: str, names: Iterable[str]) -> list[Tensor]:
            return [saved[f"{part}/{n}"].to_local() for n in names if f"{part}/{n}" in saved]

        fragments = []
        for fragment, one in zip(self._rounds.fragments, outer["fragments"], strict=True):
            names = list(fragment.parameters)
            parts: dict[str, Any] = {part: tensors(f"outer/{part}", names) for part in _PARTS}
            if not one.pop("averaged"):
                parts["mean"] = None
            sent.append(tensors(f"{mine}/sent", names))
            fragments.append({**one, **parts, "names": names})
        under_way = [(key, x) for key, x in saved.items() if key.startswith(f"{mine}/{self._at}/under way/")]
        outer |= {"fragments": fragments, "buffers": [x for _, x in sorted(under_way, key=_number)]}
        for key, value in saved.items():
            owner, _, rest = key.partition("/")
            kind, _, name = rest.partition("/")
            if kind == "residual":
                flat[f"residual/{owner.removeprefix('site')}/{name}"] = value.to_local()
            elif kind == self._at and name.startswith("shared/"):
                flat[name] = value
            elif kind == self._at and name.startswith("local/"):
                flat[name.replace("local", f"local/{rank}", 1)] = value
        flat[f"sent/{rank}"] = sent
        found = fitting(self, flat)
        states = {k.partition("/optimizer/")[2]: value for k, value in saved.items() if f"{mine}/optimizer/" in k}
        with self._unwatched():
            set_optimizer_state_dict(self.services.model, self.services.optimizers, states, options=_FLAT)
        found.restore()
        found.adopt()

    def _here(self) -> dict[str, Tensor]:
        """Return the parameters of which this rank has a part."""
        return {name: p for fragment in self._rounds.fragments for name, p in fragment.parameters.items()}


def _number(one: tuple[str, Any]) -> int:
    return int(one[0].rpartition("/")[2])


def sharded_as(parameter: Tensor, x: Tensor) -> DTensor:
    """Return a tensor of this rank as its part of one that is sharded as the parameter."""
    assert isinstance(parameter, DTensor)
    spec = parameter._spec
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta._replace(dtype=x.dtype)
    return DTensor(x, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def attach_sites(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    local: Local,
    sites: DeviceMesh | dist.ProcessGroup,
    settings: AttachSettings,
) -> SiteSync:
    """Attach local steps between sites; all ranks of all sites must call it."""
    check_model(model)
    managed, site = shards_of(model, optimizers, local, settings.keep_dense)
    group = across(sites, site.groups, "sites", "site")
    topology = Topology(dist.get_world_size(group))
    return attach_local(model, optimizers, local, managed, group, topology, settings, SiteSync, site)


def shards_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], local: Local, keep_dense: DenseRule
) -> tuple[list[Managed], Site]:
    """Return a sharded model's parameters, and the ranks over which it is sharded."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def changed() -> None:
        for module in sharded:  # after a forward, the root's parameters may still be unsharded
            module.reshard()

    changed()
    if local.inside is not None:
        raise ValueError("the ranks of a site average gradients by FSDP2 already: leave out inside=")
    managed = managed_parameters(model, local.method, keep_dense, sharded=True)
    check_optimizers(managed, optimizers)
    return managed, Site(_groups(managed), managed[0].device, changed)


def _groups(managed: Sequence[Managed]) -> list[dist.ProcessGroup]:
    """Return this rank's groups along the dimensions of all meshes over which the model is sharded."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for one in managed:
        if not isinstance(one.parameter, DTensor):
            raise ValueError(
                f"{one.name} is trained but not sharded, so a site's ranks do not average it: call fully_shard on the "
                "root"
            )
        mesh = one.parameter.device_mesh
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [group for ranks, group in sorted(found.items()) if len(ranks) > 1]
