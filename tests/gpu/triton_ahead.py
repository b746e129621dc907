"""Compiles the Triton kernels for cards that are not there. Prints, as JSON, what each would spill from registers."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.core.kernels.orthogonal import TILE_PRODUCTS, round_kernel
from thinwire.core.kernels.pairs import average_kernel, padded_keys_kernel, send_kernel, union_kernel
from thinwire.core.kernels.quantise.bins import bins_kernel, means_kernel, sides_kernel
from thinwire.core.kernels.quantise.codes import LARGEST_BLOCK, decode_kernel, tile_of
from thinwire.core.kernels.quantise.linear import encode_kernel
from thinwire.core.kernels.select.gaussian import fit_kernel
from thinwire.core.kernels.select.mstopk import bisect_kernel
from thinwire.core.kernels.select.ranked import (
    NAN,
    count_kernel,
    digits_kernel,
    gather_kernel,
    sample_kernel,
    write_kernel,
)
from thinwire.core.kernels.symmetric import pack_kernel, unpack_kernel
from thinwire.core.kernels.tables import choose_kernel
from thinwire.systems.kfac.averages import finite_kernel, renew_kernel
from thinwire.systems.optim.advance import advance_kernel
from thinwire.systems.optim.moments import moments_kernel, shrinkage_kernel
from thinwire.systems.optim.norms import ratios_kernel, squares_kernel

TARGETS = [
    *(GPUTarget("cuda", arch, 32) for arch in (75, 80, 90, 100)),
    *(GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")),
]
_SELECT = {"bits": "*i32", "state": "*i64", "size": "i32", "span": "i32", "stride": "i32", "place": "i32", "k": "i32"}
_SELECT |= {"lists": "*i32", "found": "*i32", "sums": "*fp64", "counts": "*i32", "out": "*i64", "share": "i64"}
_SELECT |= {"most": "i32", "programs": "i32", "quantile": "i64", **dict.fromkeys(("rank0", "rank1", "rank2"), "i32")}
_SELECT |= {"TILED": 2048, "SAMPLED": 4096, "WIDTH": 1024, "CELLS": 3102}
_LARGE = {"size": "i64", "k": "i64", "most": "i64", "rank0": "i64"}
_PAIRS = {"a": "*fp32", "out": "*fp32", "indices": "*i64", "finite": "*i1", "values": "*fp32", "scale": "*fp32"}
_PAIRS |= {
    "sent": "*fp32",
    "places": "*i32",
    "k": "i32",
    "padded": "i32",
    "size": "i32",
    "steps": "i32",
    "parts": "i32",
}
_PAIRS |= {"ranks": "i32", "value_row": "i32", "index_row": "i32", "PARTS": 8, "SPAN": 4096, "WIDTH": 512, "LIMIT": 0}
_SUM = {**_PAIRS, "indices": "*i32"}
_MERGE = {**_PAIRS, **dict.fromkeys(("other_indices", "found", "places"), "*i64"), "bits": "*i32", "keys": "*i32"}
_MERGE |= {"n": "i32", "other_values": "*fp32", "sums": "*fp32"}
CASES = [  # a kernel, and its parameters: types, or the numbers of its constants
    (sample_kernel, _SELECT),
    (sample_kernel, {**_SELECT, **_LARGE}),
    *((gather_kernel, {**_SELECT, "MOMENT": moment}) for moment in (0, 1, 2)),
    (gather_kernel, {**_SELECT, **_LARGE, "MOMENT": 0}),
    *((digits_kernel, {**_SELECT, "DIGIT": digit, "RANKS": ranks}) for digit, ranks in ((0, 1), (1, 1), (3, 3))),
    (digits_kernel, {**_SELECT, **_LARGE, "DIGIT": 1, "RANKS": 2}),
    (bisect_kernel, {**_SELECT, "SAMPLINGS": 30, "BASE": 0}),
    (fit_kernel, {**_SELECT, "ROUNDS": 3, "DENSE": 0}),
    *((count_kernel, {**_SELECT, "MOST": most}) for most in (0, NAN)),
    (count_kernel, {**_SELECT, **_LARGE, "MOST": NAN}),
    *((write_kernel, {**_SELECT, "LINE": line, "WIDE": False}) for line in (False, True)),
    (write_kernel, {**_SELECT, **_LARGE, "LINE": False, "WIDE": True}),
    (send_kernel, _PAIRS),
    *((send_kernel, {**_PAIRS, "sent": f"*{wire}", "LIMIT": 65504.0}) for wire in ("fp16", "bf16")),
    (average_kernel, _SUM),
    (average_kernel, {**_SUM, "scale": None}),
    (union_kernel, _MERGE),
    (padded_keys_kernel, _MERGE),
    *((average_kernel, {**_SUM, "values": f"*{wire}", "PARTS": 64}) for wire in ("fp16", "bf16")),
]

# --- quantisers
_NAMES = {
    "*fp32": "a x out scales limits tops means values divisor",
    "*fp64": "found",
    "*u8": "codes",
    "*i16": "noise",
    "*i32": "owner",
    "*i64": "tiles befores sizes",
    "fp32": "root",
    "i64": "n",
}
_TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def _quantiser(kernel, **given):
    found = {name: _TYPES.get(name, "i32") for name in kernel.jit.arg_names}
    return kernel, {**found, **given}


_PACKED = {"limits": None, "tops": None}
_LINEAR = {"values": None, "owner": None, "TAKE": False}
_BINS = {"ZERO": 0, "owner": None}
_SIGNS = {"BITS": 1, **tile_of(8)}
CASES += [
    *(
        _quantiser(kernel, BITS=bits, **tile_of(block), **given)
        for bits, block in ((2, 256), (4, 256), (8, 256), (8, 16), (8, LARGEST_BLOCK))
        for kernel, given in (
            (encode_kernel, {**_PACKED, "noise": None, "L2": False, "LEAVE": True}),
            (encode_kernel, {**_PACKED, "L2": True, "LEAVE": False}),
            (decode_kernel, {**_LINEAR, "ZERO": 2 ** (bits - 1) - 1}),
        )
    ),
    _quantiser(encode_kernel, codes="*i8", BITS=2, L2=False, LEAVE=False, **tile_of(512)),
    _quantiser(decode_kernel, **_LINEAR, codes="*i8", BITS=8, ZERO=0, **tile_of(512)),
    *(
        _quantiser(kernel, BITS=bits, **tile_of(block), **given)
        for bits, block in ((1, 256), (2, 256), (2, 16), (2, LARGEST_BLOCK))
        for kernel, given in (
            (bins_kernel, {"BOUND": 0.9957}),
            (decode_kernel, {**_BINS, "TAKE": True, "divisor": None}),
            (decode_kernel, {**_BINS, "TAKE": False}),
        )
    ),
    *(_quantiser(means_kernel, befores=None, BOUND=0.9957, BINS=bins, TURN=256) for bins in (2, 4)),
    _quantiser(bins_kernel, **_SIGNS, scales=None, found=None, BOUND=1.0),
    *(_quantiser(decode_kernel, **_SIGNS, scales=None, ZERO=0, TAKE=take) for take in (False, True)),
    _quantiser(sides_kernel, TILE=2048),
    _quantiser(means_kernel, BOUND=1.0, BINS=2, TURN=256),
]
_ROUND = {"x": "*fp32", "chunks": "*i64", "before": "*fp64", "out": "*fp32", "after": "*fp64"}
CASES += [
    (
        round_kernel,
        {**_ROUND, "RANK": rank, "SIDE": side, "TILE": TILE_PRODUCTS // side**2, "APPLY": apply, "GRAM": gram},
    )
    for rank, side in ((4, 4), (16, 16), (32, 32))
    for apply, gram in ((False, True), (True, True), (True, False))
]
_TRIANGLE = {"matrix": "*fp32", "packed": "*fp32", "side": "i32", "room": "i32", "BLOCK": 512}
_STRIDES = dict.fromkeys(("down", "across", "apart"), "i32")
_FACTORS = {**dict.fromkeys(("counts", "updates", "keep", "after"), "*fp32"), "rows": "*i64", "BLOCK": 1024}
CASES += [
    (pack_kernel, {**_TRIANGLE, **_STRIDES, "factor": "fp32", "end": "fp32", "END": 1}),
    (unpack_kernel, _TRIANGLE),
    (finite_kernel, {"rows": "*i64", "broken": "*i32", "BLOCK": 1024}),
    (renew_kernel, {**_FACTORS, "broken": "*i32"}),
]
_TABLE = {"rows": "*i64", "BLOCK": 1024}
_LAYERS = {**_TABLE, "squares": "*fp64", "ratios": "*fp32"}
_RATES = dict.fromkeys(("gain", "sign", "decay", "momentum", "rate"), "fp32")
_RULE = dict.fromkeys(("coefficient", "decay", "eps", "least", "most"), "fp32")
_ADAM = dict.fromkeys(("sign", "decay", "beta1", "beta2", "factor", "addend"), "fp32")
CASES += [
    (choose_kernel, {**_TABLE, "flag": "*u8"}),
    *((squares_kernel, {**_TABLE, "squares": "*fp64", "LISTS": lists}) for lists in (1, 2)),
    (ratios_kernel, {**_LAYERS, **_RULE, "columns": "i32"}),
    (shrinkage_kernel, {"squares": "*fp64", "count": "i32", "limit": "fp32", "shrink": "*fp32", "BLOCK": 1024}),
    *(
        (advance_kernel, {**_TABLE, **_RATES, "ratios": "*fp32", "RATIOS": r, "MOMENTUM": m, "NESTEROV": n})
        for r, m, n in ((True, True, False), (True, True, True), (False, True, False), (True, False, False))
    ),
    (moments_kernel, {**_TABLE, **_ADAM, "squares": "*fp64", "shrink": "*fp32", "SHRINK": True}),
]


def compiled(target, kernel, parameters):
    options = {name: parameters[name] for name in parameters if name not in kernel.jit.arg_names}
    parameters = {name: parameters[name] for name in kernel.jit.arg_names}
    constants = {name: value for name, value in parameters.items() if not isinstance(value, str)}
    signature = {**parameters, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel.jit, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=options)


def spilled(kernel):
    """Bytes of local memory, stack or scratch that a thread needs."""
    if "cubin" not in kernel.asm:
        found = re.findall(r"(?:private_segment_fixed_size|[sv]gpr_spill_count):\s*(\d+)", kernel.asm["amdgcn"])
    else:
        tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"(?:STACK|LOCAL):(\d+)", said)
    assert found, "nothing is said about spills"
    return sum(map(int, found))


if __name__ == "__main__":
    targets = [target for target in TARGETS if str(target.arch) in (sys.argv[1:] or [str(target.arch)])]
    json.dump({str(t.arch): sum(spilled(compiled(t, *case)) for case in CASES) for t in targets}, sys.stdout)
