"""FSDP2's parameter groups. The only file that uses FSDP2's private interface.

FSDP2 reduces a module's gradients as one flat tensor: this rank's rows of every parameter, padded to the number of rows
of the first shard, one after the other. Its public hooks only pass that tensor; names, shapes and process groups are
read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class ParameterRows:
    """This rank's rows of one parameter in the flat tensor: their shape, maybe empty, and the elements before them."""

    name: str
    shape: tuple[int, ...]
    offset: int
    parameter: DTensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def sharded(self, local: Tensor) -> DTensor:
        """Wrap a tensor of this shape as this rank's part of one sharded like the parameter, over the shards only."""
        mesh = self.parameter.device_mesh
        if mesh.ndim > 1:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[-1]]
        shape, cut = self.parameter.shape, self.parameter.placements[-1:]
        return DTensor.from_local(local, mesh, cut, run_check=False, shape=shape, stride=_strides(shape))

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, _strides(self.shape), flat.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class Group:  # one FSDP2 module: the gradients that are reduced together
    index: int
    name: str  # "" for the root
    module: nn.Module
    pieces: tuple[ParameterRows, ...]  # of its trainable parameters, in their order
    elements: int  # of the flat tensor, with padding, if all parameters have gradients
    device: torch.device
    shards: dist.ProcessGroup  # of the ranks that share this copy of the model
    replicas: dist.ProcessGroup | None  # of those that hold the same shard in other copies; None: no native HSDP mesh
    _inside: Any

    @property
    def reduces(self) -> bool:
        """False after ``set_requires_all_reduce(False)``."""
        return bool(self._inside.all_reduce_grads)

    @property
    def hooked(self) -> bool:
        return self._inside._all_reduce_hook is not None

    def take_over(self, hook: Callable[[Tensor], None]) -> Callable[[], None]:
        """Set FSDP2's all-reduce hook, and keep FSDP2 from averaging over the replicas itself. Return what undoes it.

        A native HSDP group becomes as if made on ``mesh["shard"]``; unused parameters count as zeros, so all are there.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        inside, before, after_forward = self._inside, self._inside.mesh_info, self._inside.post_forward_mesh_info
        unused = getattr(inside, "reduce_scatter_unused_params", None)
        if unused is not None:  # torch before 2.13 does not have it
            inside.reduce_scatter_unused_params = True
        if self.replicas is not None:
            plain = FSDPMeshInfo(mesh=before.mesh, shard_mesh_dim=before.shard_mesh_dim)
            if (separate := getattr(before, "reduce_scatter_process_group", None)) is not None:
                plain.reduce_scatter_process_group = separate
            inside.mesh_info = plain
            if after_forward == before:  # "reshard to the mesh itself"; else to a smaller one, or not at all
                inside.post_forward_mesh_info = plain
        self.module.set_all_reduce_hook(hook)  # type: ignore[operator]

        def put_back() -> None:
            inside._all_reduce_hook = None
            if unused is not None:
                inside.reduce_scatter_unused_params = unused
            if self.replicas is not None:
                if inside.post_forward_mesh_info is inside.mesh_info:
                    inside.post_forward_mesh_info = before
                inside.mesh_info = before

        return put_back

    def replace_reduce_scatter(self, scatter: Any) -> Callable[[], None]:
        inside, before = self._inside, self._inside._reduce_scatter_comm
        self.module.set_custom_reduce_scatter(scatter)  # type: ignore[operator]
        return lambda: setattr(inside, "_reduce_scatter_comm", before)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def groups_of(model: nn.Module) -> list[Group]:
    """Return the FSDP2 modules of a model, in order of registration; refuse what this adapter does not support."""
    from torch.distributed.fsdp import FSDPModule

    names = {module: name for name, module in model.named_modules()}
    found: list[Group] = []
    seen: set[int] = set()
    sharded: list[tuple[Any, str]] = [(m, name) for m, name in names.items() if isinstance(m, FSDPModule)]
    for module, name in sharded:
        module.reshard()  # after a forward, the root's parameters may still be unsharded
        for inside in _inside(module, name):
            if id(inside) not in seen:
                seen.add(id(inside))
                found.append(_group(len(found), name, module, inside, names))
    if not found:
        raise TypeError(
            "the model has no module under FSDP2: call torch.distributed.fsdp.fully_shard first; for whole models use "
            "thinwire.attach"
        )
    if outside := [n for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]:
        raise ValueError(
            f"{outside[0]} is trained but not under any FSDP2 module, so it is not averaged: "
            "call fully_shard on the root"
        )
    return found


def _inside(module: nn.Module, name: str) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    elif hasattr(state, "_fsdp_param_group"):  # torch before 2.12
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    else:
        raise NotImplementedError(
            f"FSDP2 of torch {torch.__version__} keeps its parameters in a way that thinwire does not know"
        )
    if len(groups) > 1:
        raise NotImplementedError(
            f"module {name!r} has {len(groups)} parameter groups, on different meshes (shard_placement_fn); FSDP2 does "
            "not tell a hook which of them it is called for: put each mesh's parameters into their own module"
        )
    return groups


def _group(index: int, name: str, module: nn.Module, inside: Any, names: dict[nn.Module, str]) -> Group:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    mesh = inside.mesh_info
    if not isinstance(mesh, FSDPMeshInfo) or getattr(mesh, "is_spmd_mesh", False):
        raise NotImplementedError(
            f"module {name!r} is not sharded over its own mesh ({type(mesh).__name__}): use a mesh of two dimensions, "
            "replicas and shards, or one of shards; for replicas alone use thinwire.attach"
        )
    pieces: list[ParameterRows] = []
    offset = 0
    for one in inside.fsdp_params:
        owner = one._module_info
        full = ".".join(filter(None, (names[owner.module], owner.param_name)))
        if one.sharded_param.is_meta:
            raise ValueError(f"{full} is on the meta device: give the model its memory and its values first")
        if one.offload_to_cpu:
            raise NotImplementedError(f"{full} is offloaded to the CPU, which this adapter does not support")
        if one.is_dtensor:
            raise NotImplementedError(f"{full} is also sharded by tensor parallelism, which is not supported")
        if one.sharded_param.requires_grad:
            pieces.append(ParameterRows(full, tuple(one.sharded_size), offset, one.sharded_param))
            offset += one.padded_sharded_param_size.numel()
    replicas = mesh.replicate_process_group if isinstance(mesh, HSDPMeshInfo) else None
    return Group(index, name, module, tuple(pieces), offset, inside.device, mesh.shard_process_group, replicas, inside)


def across(
    given: DeviceMesh | dist.ProcessGroup, inside: Sequence[dist.ProcessGroup], option: str, dimension: str
) -> dist.ProcessGroup:
    """Return the group of an option: the ranks that hold this one's shards elsewhere, and none of those ``inside``."""
    what = f'{option}= must be one dimension of a mesh, such as mesh["{dimension}"], not '
    if not isinstance(given, (DeviceMesh, dist.ProcessGroup)):
        raise TypeError(f"{what}{type(given).__name__}")
    if isinstance(given, DeviceMesh) and given.ndim != 1:
        raise ValueError(f"{what}{given.ndim}")
    group = given.get_group() if isinstance(given, DeviceMesh) else given
    ranks, me = set(dist.get_process_group_ranks(group)), dist.get_rank()
    if me not in ranks or any(ranks & set(dist.get_process_group_ranks(one)) != {me} for one in inside):
        raise ValueError(
            f"{option}= must hold this rank and no other rank of its {_INSIDE[option]}: give the dimension of the mesh "
            "over which the model is not sharded"
        )
    return group


_INSIDE = {"replicas": "shards", "sites": "site"}
