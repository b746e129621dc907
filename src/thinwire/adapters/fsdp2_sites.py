"""Local steps between sites, each with the model sharded over its ranks: for models larger than a card.

Every rank exchanges its own shards with the ranks that hold the same shards at other sites, so as many streams cross
the thin wire as a site has ranks. A shard is a parameter like another to the rounds of ``engine/local``; what is
decided from values or times, a site's ranks decide together.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_together
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from thinwire.adapters.fsdp2_groups import across
from thinwire.core.checks import local_path
from thinwire.core.durable import readable
from thinwire.core.program import Topology
from thinwire.core.program.bucket import local_shard
from thinwire.core.program.ops import in_own_modes
from thinwire.core.program.state import extend
from thinwire.engine.attach import attach_local, check_model
from thinwire.engine.backward_hooks import AttachSettings
from thinwire.engine.local.settings import Local
from thinwire.engine.local.site import Site
from thinwire.engine.local.sync import LocalSync
from thinwire.engine.parameters import DenseRule, ManagedParameter, check_optimizers, managed_parameters
from thinwire.engine.services import fitting
from thinwire.engine.state.checkpoint import take_over, together
from thinwire.engine.state.persistence import frozen_since, name_of, split, warn_left_out

_FACTS = "facts"
_PARTS = ("anchors", "momenta", "slow", "mean")  # of a fragment's state, equal at all sites


class SiteSync(LocalSync):
    """The handle of ``thinwire.adapters.fsdp2.attach(..., sites=)``: a ``LocalSync`` of this rank's shards.

    It is saved by :meth:`save`, whose files have these keys, all by parameter: ``outer/<part>``, equal at all sites;
    ``site<k>/weights``, ``optimizer/<field>``, ``residual`` and ``sent``, of each, and ``groups``, the settings of its
    optimizers; and below them ``<i>of<n>``, what belongs to one shard and cannot be cut otherwise.
    """

    @property
    def _at(self) -> str:
        """Return which of its site's shards this rank has."""
        assert self.services.site is not None
        return self.services.site.place

    def _own(self) -> dict[str, Any]:
        """Return this site's weights and the states of its optimizers, not copied, and of this rank its buffers."""
        model = self.services.model
        found: dict[str, Any] = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
        names = {id(p): name for name, p in model.named_parameters()}
        for p, state in (pair for optimizer in self.services.optimizers for pair in optimizer.state.items()):
            if id(p) not in names:
                raise ValueError("an optimizer owns a parameter that the model does not have, so its state has no name")
            found |= {f"optimizer/{key}/{names[id(p)]}": x for key, x in state.items()}
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
                whole = value if begin is None else extend(value, begin, local_shard(parameters[name]).shape)
                saved[f"{site}/residual/{name}"] = sharded_as(parameters[name], whole)
            elif kind in ("shared", "local"):
                owner = "outer" if kind == "shared" else site
                saved[f"{owner}/{self._at}/{kind}/{rest.removeprefix(f'{rank}/')}"] = value
            elif kind not in ("offset", "rank", "pace"):  # speeds are measured anew
                facts[key] = value
        groups = [optimizer.state_dict()["param_groups"] for optimizer in self.services.optimizers]
        torch.save(tree_map_only(Tensor, Tensor.cpu, readable(groups, "param_groups")), file := io.BytesIO())
        saved[f"{site}/groups"] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        facts["outer"] = outer | {"fragments": told}
        saved[_FACTS] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        save_together(saved, checkpoint_id=_place(directory))

    @in_own_modes()
    def load(self, directory: str | Path) -> None:
        """Continue from what :meth:`save` has written: on as many sites and shards, bit for bit.

        All ranks of all sites must call it. On another number of shards, what belongs to one shard alone is left out:
        factors of low-rank codecs, which are drawn again, and buffers. On another number of sites, all begin with the
        outer weights, the first site's optimizer states and the mean of the residuals.

        Raises:
            ValueError: on all ranks, if it does not fit one of them, because it was saved with other settings or from
                another model or optimizer. Nothing has changed.
        """
        self._check_own("load()")
        place, services = _place(directory), self.services
        with together(self):
            reader: Any = _storage_setup(None, place, reader=True)
            known: dict[str, Any] = reader.read_metadata().state_dict_metadata
            if _FACTS not in known:
                raise ValueError(f"{place} holds no checkpoint of SiteSync.save")
        told = {_FACTS: torch.empty(known[_FACTS].size, dtype=torch.uint8)}
        load_together(told, storage_reader=reader)
        with together(self):
            facts = json.loads(bytes(told[_FACTS].tolist())) | {"rank": services.rank}
            mine = f"site{services.rank if self._check_fits(facts) else 0}"
            saved = self._rooms(known, mine, place)
        load_together(saved, storage_reader=reader)
        with together(self):
            content = self._content(saved, mine, place)
            found = fitting(self, self._flat(facts, saved, mine))
        take_over(place, content, services.model, services.optimizers, self, found)
        for name, x in services.model.named_buffers():
            x.copy_(saved.get(f"{mine}/{self._at}/buffer/{name}", x))

    def _rooms(self, known: dict[str, Any], mine: str, place: Path) -> dict[str, Any]:
        """Return room for all that is to be read. ``ValueError``, if the checkpoint lacks something or has too much."""
        own, parameters, model = self._own(), self._here(), dict(self.services.model.named_parameters())
        needed = {f"{mine}/weights/{name}" for name in model} | {f"outer/anchors/{name}" for name in parameters}
        wrong = (needed | {f"{mine}/groups"}) - known.keys()
        wrong |= {key for key in known.keys() - needed if key.startswith(f"{mine}/weights/")}
        there = {key: getattr(known.get(f"{mine}/{key}"), "size", None) for key in own}
        wrong |= {f"{mine}/{key}" for key, x in own.items() if there[key] not in (None, getattr(x, "shape", None))}
        if wrong:
            raise ValueError(f"{place} was saved from another model or optimizer: they differ in {min(wrong)}")
        frozen, left, rooms = frozen_since(self.services.model, {m.name for m in self._parameters.values()}), set(), {}
        for key, about in known.items():
            owner, _, rest = key.partition("/")
            kind, _, name = rest.partition("/")
            p = model.get(name.partition("/")[2] if kind == "optimizer" else name)
            ours = rest in own or kind in ("groups", "optimizer", self._at) or name in parameters
            if (ours and owner in ("outer", mine)) or (kind == "residual" and name in parameters):
                rooms[key] = _room(about, own.get(rest), p)
            elif name in frozen and kind in ("anchors", "residual"):
                left.add(name)
        warn_left_out(left)
        return rooms

    def _content(self, saved: dict[str, Any], mine: str, place: Path) -> dict[str, Any]:
        """Return model and optimizers as a checkpoint has them; what had no state when it was saved has none."""
        model, states, packed = self.services.model, split(saved, f"{mine}/optimizer/"), []
        names = {id(p): name for name, p in model.named_parameters()}
        told = torch.load(io.BytesIO(bytes(saved[f"{mine}/groups"].tolist())), map_location="cpu", weights_only=True)
        for optimizer, groups in zip(self.services.optimizers, told):
            if lacking := sorted(optimizer.defaults.keys() - groups[0].keys()):
                raise ValueError(f"{place} was saved from another optimizer, which had no {lacking[0]}")
            own = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
            pairs = zip((number for group in groups for number in group["params"]), own)
            found = {number: {key: of[name] for key, of in states.items() if name in of} for number, name in pairs}
            found = {number: state for number, state in found.items() if state}
            packed.append(optimizer.state_dict() | {"param_groups": groups, "state": found})
        whole = model.state_dict(keep_vars=True)  # checkpoint wrappers give its entries other names
        weights = {key: saved[f"{mine}/weights/{names[id(x)]}"] if id(x) in names else x for key, x in whole.items()}
        return {"model": weights, "optimizer": packed}

    def _flat(self, facts: dict[str, Any], saved: dict[str, Any], mine: str) -> dict[str, Any]:
        """Return the state of local steps as ``state_dict`` has it."""
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
        under_way = (f"{mine}/{self._at}/under way/{i}" for i in range(len(saved)))
        outer |= {"fragments": fragments, "buffers": [saved[key] for key in under_way if key in saved]}
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
        return flat

    def _here(self) -> dict[str, Tensor]:
        """Return the parameters of which this rank has a part."""
        return {name: p for fragment in self._rounds.fragments for name, p in fragment.parameters.items()}


def _place(directory: str | Path) -> Any:
    """Return where a checkpoint is: torch takes addresses, such as ``s3://bucket/run``, to fsspec."""
    return directory if isinstance(directory, str) and "://" in directory else local_path(directory)


def _room(about: Any, *likes: Any) -> Tensor | None:
    """Return room for a value: like the first of these that has its shape. None: it is no tensor."""
    if not isinstance(about, TensorStorageMetadata):
        return None
    like = next((x for x in likes if isinstance(x, Tensor) and x.shape == about.size), torch.empty(about.size))
    return torch.empty_like(like, dtype=about.properties.dtype, requires_grad=False)


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
) -> tuple[list[ManagedParameter], Site]:
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


def _groups(managed: Sequence[ManagedParameter]) -> list[dist.ProcessGroup]:
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
