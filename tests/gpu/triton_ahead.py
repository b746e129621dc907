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
from thinwire.core.kernels.select.histogram import digits_kernel
from thinwire.core.kernels.symmetric import pack_kernel, unpack_kernel
from thinwire.core.kernels.tables import choose_kernel, copy_kernel
from thinwire.systems.kfac.averages import finite_kernel, renew_kernel
from thinwire.systems.optim.advance import advance_kernel
from thinwire.systems.optim.moments import moments_kernel, shrinkage_kernel
from thinwire.systems.optim.norms import ratios_kernel, squares_kernel

TARGETS = [
    *(GPUTarget("cuda", arch, 32) for arch in (75, 80, 90, 100)),
    *(GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")),
]
_COUNTS = {"keys": "*i32", "prefix": "*i64", "counts": "*i64", "BLOCK": 2048, "TURNS": 8}
_ROUND = {"x": "*fp32", "chunks": "*i64", "before": "*fp64", "out": "*fp32", "after": "*fp64"}
CASES = [  # a kernel, and its parameters: types, or the numbers of its constants
    (digits_kernel, {**_COUNTS, "size": size, "SHIFT": shift, "BITS": bits})
    for size, shift, bits in (("i32", 31, 11), ("i32", 20, 10), ("i64", 31, 11))
]
CASES += [
    (
        round_kernel,
        {**_ROUND, "RANK": rank, "SIDE": side, "TILE": TILE_PRODUCTS // side**2, "APPLY": apply, "GRAM": gram},
    )
    for rank, side in ((4, 4), (16, 16), (32, 32))
    for apply, gram in ((False, True), (True, True), (True, False))
]
_TRIANGLE = {"matrix": "*fp32", "packed": "*fp32", "side": "i32", "BLOCK": 512}
_FACTORS = {**dict.fromkeys(("counts", "updates", "keep", "after"), "*fp32"), "rows": "*i64", "BLOCK": 1024}
CASES += [
    (pack_kernel, {**_TRIANGLE, "factor": "fp32", "end": "fp32", "down": "i32", "across": "i32", "END": 1}),
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
    (copy_kernel, {**_TABLE, "factor": "fp32"}),
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
    constants = {name: value for name, value in parameters.items() if not isinstance(value, str)}
    signature = {**parameters, **dict.fromkeys(constants, "constexpr")}
    signature = {name: signature[name] for name in kernel.jit.arg_names}
    return triton.compile(ASTSource(fn=kernel.jit, signature=signature, constexprs=constants), target=target)


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
