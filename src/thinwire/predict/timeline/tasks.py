"""The tasks of the compute stream in one step: pending updates, forward by module, backward by tensor, optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from thinwire.core.pricing.profiles import ModelProfile, ModuleTime
from thinwire.core.program import PlanBucket
from thinwire.predict.timeline.machine import ComputeTask
from thinwire.predict.timeline.programs import ProgramPart


@dataclass(frozen=True)
class StepTasks:
    """The compute stream's tasks, and the deferred parts in the order in which their layers are needed."""

    tasks: list[ComputeTask]
    deferred: list[ProgramPart]


def tasks_of(
    profile: ModelProfile,
    buckets: Sequence[PlanBucket],
    deferring: Set[int],
    buckets_before: Sequence[PlanBucket],
    deferred: Sequence[ProgramPart],
    optimizer_seconds: float,
) -> StepTasks:
    """Lay out one step.

    Args:
        profile: the model.
        buckets: buckets of this step.
        deferring: buckets that are updated in the next forward.
        buckets_before: buckets of the previous step.
        deferred: parts that the previous step left over.
        optimizer_seconds: time of the whole update.
    """
    modules = _modules(profile)
    size_of = {tensor.name: tensor.size for tensor in profile.tensors}
    total = max(1, profile.elements)

    def update_seconds(bucket: PlanBucket) -> float:
        return optimizer_seconds * sum(size_of[name] for name in bucket.names) / total

    need = _first_need(profile, modules)
    wanted = sorted(deferred, key=lambda p: (min(need[name] for name in buckets_before[p.bucket].names), -p.bucket))
    tasks: list[ComputeTask] = []
    position = 0
    for number, module in enumerate(modules):
        while position < len(wanted):
            bucket = wanted[position].bucket
            if min(need[name] for name in buckets_before[bucket].names) > number:
                break
            tasks.append(ComputeTask("optimizer", update_seconds(buckets_before[bucket]), bucket, needs=position))
            position += 1
        tasks.append(ComputeTask(f"forward {module.name}", module.forward_seconds))
    tasks += _backward(profile, buckets)
    later = sum(update_seconds(buckets[b]) for b in deferring)
    owed = optimizer_seconds if not deferring else max(0.0, optimizer_seconds - later)
    tasks.append(ComputeTask("optimizer", owed, last=True))
    return StepTasks(tasks, list(wanted))


def _backward(profile: ModelProfile, buckets: Sequence[PlanBucket]) -> list[ComputeTask]:
    """Return one task per gradient; the task that fills a bucket starts its program."""
    bucket_of = {name: index for index, bucket in enumerate(buckets) for name in bucket.names}
    left = Counter(bucket_of.values())
    tasks = []
    for tensor in profile.tensors:
        bucket = bucket_of[tensor.name]
        left[bucket] -= 1
        completes = None if left[bucket] else bucket
        tasks.append(ComputeTask(f"backward {tensor.name}", tensor.backward_seconds, bucket, completes=completes))
    return tasks


def _modules(profile: ModelProfile) -> list[ModuleTime]:
    """Return the modules in forward order; their seconds add up to the profile's forward pass.

    If the profile has no modules: the owners of the tensors, the last gradient's first, in proportion to their backward
    seconds.
    """
    modules = list(profile.modules)
    if not modules:
        weights: dict[str, float] = {}
        for tensor in reversed(profile.tensors):
            weights[tensor.module] = weights.get(tensor.module, 0.0) + tensor.backward_seconds
        modules = [ModuleTime(name, weight) for name, weight in weights.items()] or [ModuleTime("model", 0.0)]
    total = sum(module.forward_seconds for module in modules)
    if total > 0:
        return [ModuleTime(m.name, m.forward_seconds / total * profile.forward_seconds) for m in modules]
    return [ModuleTime(m.name, profile.forward_seconds / len(modules)) for m in modules]


def _first_need(profile: ModelProfile, modules: Sequence[ModuleTime]) -> dict[str, int]:
    """Map each tensor to the index of the module that needs it: its owner, else the nearest enclosing one, else 0."""
    places: dict[str, int] = {}
    for place, module in enumerate(modules):
        places.setdefault(module.name, place)
    need = {}
    for tensor in profile.tensors:
        owner = tensor.module
        while owner and owner not in places:
            owner = owner.rpartition(".")[0]
        need[tensor.name] = places.get(owner, 0)
    return need
