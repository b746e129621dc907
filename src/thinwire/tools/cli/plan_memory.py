"""``thinwire plan --memory``: what local steps hold on each GPU and in host memory, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from thinwire.core.checks import check_choice, check_count
from thinwire.core.pricing.profiles import BUILTIN, builtin
from thinwire.core.words import volume
from thinwire.engine.local.memory import predict_memory
from thinwire.engine.local.settings import PRESETS, local_settings
from thinwire.tools.bench.models.registry import BUILT_IN, build_model, model_in
from thinwire.tools.bench.words import load_function, split_options, told
from thinwire.tools.cli.console import Output, plain_table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = "local:sync_every=16:codec=int2,diloco"


def shapes_of(model: str) -> list[tuple[str, Sequence[int]]]:
    """Return names and shapes of a model's trained parameters; a user's is built on the meta device, without memory."""
    if model in BUILTIN:
        return [(tensor.name, tensor.shape) for tensor in builtin(model).tensors]
    name, options = split_options(model)
    module: Any
    if name in BUILT_IN:
        module = build_model(model).model
    else:
        function = load_function(name, "model")
        with told(f"model {name!r}"):
            try:
                with torch.device("meta"):
                    built = function(**options)
            except RuntimeError:  # it looks at numbers, as in its data
                built = function(**options)
        module = model_in(built)
    if not isinstance(module, nn.Module):
        raise ValueError(f"model {name!r} must return a torch.nn.Module, or a pair of it and a loss")
    return [(n, tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad]


def show(model: str, methods: str | None, output: Output, *, shards: int, sites: int, dtype: str) -> dict[str, Any]:
    """Print a table for each of the local steps, and return all as plain data."""
    check_count("--shards", shards, least=1)
    check_count("--sites", sites, least=2)
    check_choice("--dtype", dtype, tuple(DTYPES))
    shapes, found = shapes_of(model), []
    elements = sum(torch.Size(shape).numel() for _, shape in shapes)
    for label in (methods or DEFAULT).split(","):
        name, options = split_options(label.strip())
        if name.lower() not in PRESETS:
            raise ValueError(f'--memory counts "local" and "diloco", with their options, not {name!r}')
        rows = predict_memory(local_settings(name, options), shapes, sites=sites, shards=shards, dtype=DTYPES[dtype])
        total, host = (sum(getattr(row, where) for row in rows) for where in ("device", "host"))
        kinds = [{"kind": row.kind, "device": row.device, "host": row.host} for row in rows]
        title = f"{label.strip()}: {elements / 1e9:.3g} billion parameters in {dtype}, {sites} sites of {shards}"
        lines = [*kinds, {"kind": "all", "device": total, "host": host}]
        cells = ((line["kind"], _size(line["device"]), _size(line["host"])) for line in lines)
        output.say(plain_table(title, ("what", "on a GPU", "in host memory"), cells))
        found.append({"method": label.strip(), "rows": kinds, "device": total, "host": host})
    output.say("Of each rank, under Adam; activations and what FSDP2 gathers for a block come on top.")
    return {"model": model, "elements": elements, "sites": sites, "shards": shards, "dtype": dtype, "memory": found}


def _size(count: int) -> str:
    return "" if not count else f"{count / 1e9:.2f} GB" if count >= 1e9 else volume(count)
