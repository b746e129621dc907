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

from thinwire.core.kernels.quantise import blocks, means, signs, ternary
from thinwire.core.kernels.select.histogram import digits_kernel

TARGETS = [
    *(GPUTarget("cuda", arch, 32) for arch in (75, 80, 90, 100)),
    *(GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")),
]
_COUNTS = {"keys": "*i32", "prefix": "*i64", "counts": "*i64", "BLOCK": 2048, "TURNS": 8}
CASES = [  # a kernel, and its parameters: types, or the numbers of its constants
    (digits_kernel, {**_COUNTS, "size": size, "SHIFT": shift, "BITS": bits})
    for size, shift, bits in (("i32", 31, 11), ("i32", 20, 10), ("i64", 31, 11))
]

# --- quantisers
_TYPES = {  # of pointers, and of numbers
    **dict.fromkeys(
        ("a", "x", "out", "error", "scales", "tops", "means", "table", "own", "shared", "divisor"), "*fp32"
    ),
    **{
        "codes": "*u8",
        "made": "*u8",
        "bits": "*u8",
        "noise": "*i16",
        "owner": "*i32",
        "found": "*fp64",
        "root": "fp32",
    },
}


def _quantiser(kernel, **given):
    found = {name: _TYPES.get(name, "i64" if name == "n" else "i32") for name in kernel.jit.arg_names}
    return kernel, {**found, **given}


def _tile(block):
    return {name: number for name, number in blocks.tile_of(block).items() if name in ("ROWS", "WIDTH")}


CASES += [
    *(
        _quantiser(kernel, BITS=bits, **_tile(block), **given)
        for bits in (2, 4, 8)
        for block in (16, 256, 1024)
        for kernel, given in (
            (blocks.encode_kernel, {"noise": None, "L2": False, "LEAVE": True}),
            (blocks.encode_kernel, {"L2": True, "LEAVE": False}),
            (blocks.decode_kernel, {}),
            (blocks.sum_encode_kernel, {}),
        )
    ),
    *(
        _quantiser(kernel, BITS=bits, **_tile(block), **given)
        for bits, bound in ((1, 1.0), (2, 0.9957))
        for block in (16, 256, 1024)
        for kernel, given in (
            (means.bins_kernel, {"BOUND": bound}),
            (means.add_means_kernel, {"TAKE": True, "divisor": None}),
            (means.add_means_kernel, {"TAKE": False}),
        )
    ),
    *(_quantiser(means.means_kernel, BOUND=0.9957, BINS=bins, TURN=256) for bins in (2, 4)),
    *(_quantiser(signs.pack_signs_kernel, LEVELS=levels, BYTES=256) for levels in (1, 2)),
    *(_quantiser(signs.sum_signs_kernel, LEVELS=levels, MAJORITY=levels == 1, BYTES=256) for levels in (1, 2)),
    _quantiser(ternary.ternary_kernel, codes="*i8", TILE=2048),
    _quantiser(ternary.ternary_values_kernel, codes="*i8", TILE=2048),
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
