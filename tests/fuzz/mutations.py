"""Old faults: for each, a file, a piece of its mend, and what is put in its place, in the ranks' processes alone."""

from importlib.machinery import SourceFileLoader

MUTATIONS = {
    "DDP inside a module": (
        "engine/attach.py", "isinstance(module, nn.parallel.Dist", "not name and isinstance(module, nn.parallel.Dist",
    ),
    "a buffer that is rebound": (
        "engine/parameters.py", "                self.tensor = found\n", "                pass\n",
    ),
    "a flag before floats": ("engine/ranks/agreement.py", "== 0 else piece.clone()", "== 0 else piece"),
    "an expanded buffer": ("engine/ranks/agreement.py", "if shares_memory(x):", "if False:"),
    "dtypes that differ between ranks": ("engine/parameters.py", "{list(x.shape)} {x.dtype}", "{list(x.shape)}"),
    "a float8 buffer under local steps": ("engine/local/travel.py", "new, x.to(new.dtype))", "new, x)"),
    "inference mode": ("core/program/ops.py", "torch.inference_mode(False)", "nullcontext()"),
    "autocast": ("core/program/ops.py", "    for device in casts:", "    for device in ():"),
    "zeroed gradients that count as used": (
        "engine/schedules/coupled.py", "grad is delivered and grad._version == version", "grad is delivered",
    ),
    "a norm in 16 bits": (
        "engine/schedules/coupled.py",
        "return kinds.pop() if", "return min(kinds, key=lambda x: x.itemsize) if kinds or",
    ),
    "an optimizer inside another": ("engine/local/sync.py", "if owned(o, its)}", "if False}"),
    "frozen parameters that change": ("engine/local/travel.py", "if any(row[k] for row in rows)]", "if False]"),
    "gradients by hand": ("engine/sync.py", "schedule.accumulated or source.by_hand", "schedule.accumulated"),
    "a number of NumPy's": ("core/durable.py", "np.ndarray)) and content.ndim == 0:", "np.ndarray)) and False:"),
    "what a checkpoint cannot hold": ("core/durable.py", "else readable(content)", "else content"),
    "several optimizers": ("engine/state/checkpoint.py", "(optimizer, (list, tuple)) else", "(optimizer, ()) else"),
    "a layer frozen before a restart": (
        "engine/state/persistence.py", "if not p.requires_grad and name not in managed}", "if False}",
    ),
    "a handle that nobody keeps": ("engine/services.py", "ModuleHook(_held, handle)", "ModuleHook(_held, None)"),
    "private parameters of a checkpoint": ("engine/state/checkpoint.py", "if apart or name in here})", "if apart})"),
    "a target that begins to move late": ("engine/local/travel.py", "or round_ % _LOOKS:", "or round_:"),
    "buffers whose mean means nothing": (
        "engine/parameters.py", "return isinstance(self.module, _NormBase) or", "return True or",
    ),
    "steps that begin no round": ("engine/local/sync.py", "if row[0] != rows[0][0]", "if row[1] != rows[0][1]"),
    "weights of which the optimizer has a part": (
        "engine/local/sync.py", 'any(g.get("train_mode") for', 'any(g.get("no such mode") for',
    ),
    "residuals on another number of ranks": (
        "engine/state/persistence.py", "zeros_like(residuals[0])) / old_size", "zeros_like(residuals[0]))",
    ),
    "micro-batches on one rank": (
        "engine/sync.py", "self._source.enabled = self._source.enabled, False",
        "self._source.enabled = self._source.enabled, not self._exchanges",
    ),
    "moments of sites": ("adapters/fsdp2_sites.py", "in states.items() if name in of}", "in states.items() if not of}"),
}  # fmt: skip

FOUND = {
    "DDP inside a module": 6, "a buffer that is rebound": 14, "a flag before floats": 202, "an expanded buffer": 35,
    "dtypes that differ between ranks": 20, "a float8 buffer under local steps": 503, "inference mode": 332,
    "autocast": 291, "zeroed gradients that count as used": 75, "a norm in 16 bits": 189,
    "an optimizer inside another": 8, "frozen parameters that change": 8, "gradients by hand": 11,
    "a number of NumPy's": 28, "what a checkpoint cannot hold": 7, "several optimizers": 1,
    "a layer frozen before a restart": 96, "a handle that nobody keeps": 1, "private parameters of a checkpoint": 13,
    "a target that begins to move late": 137, "buffers whose mean means nothing": 89,
    "steps that begin no round": 138, "weights of which the optimizer has a part": 49,
    "residuals on another number of ranks": 20, "micro-batches on one rank": 9, "moments of sites": 15,
}  # fmt: skip
"""A seed whose script finds each; where seeds come to mean other scripts, the rest is tried."""


def without_the_mend(name, source):
    """A file's text with an old fault in it."""
    file, mended, before = MUTATIONS[name]
    assert source.count(mended) == 1, f"{file} has changed: write anew what takes out the mend of {name!r}"
    return source.replace(mended, before)


def apply(name):
    """Load thinwire with an old fault in it. Before its first import."""
    plain = SourceFileLoader.get_code

    def get_code(self, fullname):
        if not self.path.endswith(f"/thinwire/{MUTATIONS[name][0]}"):
            return plain(self, fullname)
        source = without_the_mend(name, self.get_data(self.path).decode())
        return compile(source, self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code
