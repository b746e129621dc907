"""Cut a model into two halves: factorised once, each parameter in exactly one half, each half in a file of its own.

The front takes the data; the back ends in the logits. Each machine loads its own file, so neither ever holds the
other's layers. The thin factors of a cut dense layer are those of a truncated SVD of the weight, or of its output on
sample activations. Singular vectors are unique only up to sign, and up to rotation if values are equal: so the
factorisation is done once, in one place, and its parts are given to the two machines. With random weights the spectrum
is flat: the truncation error of an untrained model says nothing about that of a trained one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.systems.split.models import Parts, View, build, dense_bias, dense_weight, inputs_of, require, view_of
from thinwire.systems.split.plan import SplitPlan

_DAMPING = 1e-6


@dataclass(frozen=True)
class Factors:
    """``W ~ u @ s @ v`` of one dense layer, and the residual's directions that are kept."""

    u: Tensor  # [f, r], for the back
    s: Tensor  # [r, r], for the front; diagonal at first, a full matrix in training
    v: Tensor  # [r, h], for the front
    directions: Tensor  # [q, h], orthonormal rows; q is 0 unless the residual is "lowrank:q" or the kind "principal"
    mean: Tensor  # [h], which "principal" takes away before, and adds behind

    @classmethod
    def empty(cls, f: int, h: int, r: int, q: int) -> Factors:
        shapes = ((f, r), (r, r), (r, h), (q, h), (h,))
        return cls(*(torch.empty(shape, device="meta") for shape in shapes))


def factorise(weight: Tensor, rank: int, moment: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best ``u [f, r], s [r, r], v [r, h]`` of a weight ``[f, h]``; computed in fp64.

    With the ``moment`` ``[h, h]``, the mean of x^T x over input rows x, they minimise the mean squared error of the
    output instead of the weight's: with C = G G^T (Cholesky), that is the SVD of ``weight @ G``.
    """
    w = weight.detach().double()
    if moment is None:
        u, values, v = _svd(w, rank)
    else:
        c = moment.double()
        c = c + torch.eye(len(c), dtype=c.dtype, device=c.device) * (_DAMPING * c.diagonal().mean())
        g = torch.linalg.cholesky(c)
        u, values, v = _svd(w @ g, rank)
        v = torch.linalg.solve_triangular(g, v, upper=False, left=False)
    return u.to(weight.dtype), torch.diag(values).to(weight.dtype), v.to(weight.dtype)


def principal_directions(moment: Tensor, count: int) -> Tensor:
    """Return the ``count`` leading eigenvectors ``[count, h]`` of a second moment ``[h, h]``, largest value first."""
    vectors = torch.linalg.eigh(moment.double()).eigenvectors.T.flip(0)[:count]
    return _signed(vectors)[0]


def rotation(size: int) -> Tensor:
    """Return a fixed orthogonal matrix, fp64: it spreads a few large numbers over all, so that codecs lose less."""
    draw = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned: Tensor = torch.linalg.qr(draw).Q
    return turned


def _svd(w: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    u, values, v = torch.linalg.svd(w, full_matrices=False)
    v, signs = _signed(v)
    return u[:, :rank] * signs[:rank], values[:rank], v[:rank]


def _signed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows with their largest entry positive, and the signs: LAPACK leaves the sign open, this fixes it."""
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(rows.dtype)
    return rows * signs, signs.squeeze(1)


class Front(nn.Module):
    """Embeddings, the layers before the cut, and the first half of the layer that is cut.

    The published pseudo-code in one line: ``z = (attention_l(layers_1..l-1(embed(ids))) @ v.T) @ s.T``.
    """

    def __init__(
        self, view: View, plan: SplitPlan, embed: nn.Module, layers: Sequence[nn.Module], parts: Parts | None,
        f: Factors,
    ) -> None:  # fmt: skip
        super().__init__()
        self.view, self.plan = view, plan
        self.embeddings = embed
        self.layers = nn.ModuleList(layers)
        self.attend = parts.attend if parts else None
        self.before = parts.before if parts else None
        self.first = parts.first if parts and plan.kind == "ffn" else None
        lowrank = plan.kind == "lowrank"
        self.v = nn.Parameter(f.v) if lowrank else None
        self.s = nn.Parameter(f.s) if lowrank else None
        self.directions = nn.Parameter(f.directions) if plan.kept_directions else None
        self.offset = nn.Parameter(-f.directions @ f.mean) if plan.kind == "principal" else None

    def forward(self, inputs: Mapping[str, Tensor], lengths: Tensor | None = None) -> Tensor:
        """Return what crosses the cut: ``[B, L, width]``."""
        return self.compress(*self.activations(inputs, lengths))

    def activations(self, inputs: Mapping[str, Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream a ``[B, L, h]`` at the cut, and the input of the first dense layer."""
        hidden = self.embeddings(**inputs_of(inputs, *self.view.inputs))
        mask = self.view.mask(hidden, lengths)
        for layer in self.layers:
            hidden = self.view.run(layer, hidden, mask)
        if self.attend is None:
            return hidden, hidden
        a: Tensor = self.attend(hidden, mask)
        return a, (a if self.before is None else self.before(a))

    def compress(self, a: Tensor, x: Tensor) -> Tensor:
        """Return what crosses the cut, of what :meth:`activations` returned."""
        if self.plan.kind == "boundary":
            return a
        if self.offset is not None:
            return a @ self.directions.T + self.offset  # type: ignore[union-attr]
        if self.first is not None:
            z: Tensor = self.first(x)
        else:
            z = (x @ self.v.T) @ self.s.T  # type: ignore[union-attr]
        if self.plan.residual == "keep":
            return torch.cat([z, a], dim=-1)
        if self.directions is not None:
            return torch.cat([z, a @ self.directions.T], dim=-1)
        return z


class Back(nn.Module):
    """The second half of the layer that is cut, the layers after it, and the head."""

    def __init__(
        self, view: View, plan: SplitPlan, layers: Sequence[nn.Module], parts: Parts | None, head: nn.Module, f: Factors
    ) -> None:
        super().__init__()
        self.view, self.plan = view, plan
        self.width = plan.width(view.hidden, view.intermediate)
        if parts and plan.kind == "lowrank":
            self.u = nn.Parameter(f.u)
            self.bias = nn.Parameter(dense_bias(parts.first).detach().clone())
        self.activation = parts.activation if parts else None
        self.second = parts.second if parts else None
        self.dropout = parts.dropout if parts else None
        self.after = parts.after if parts else None
        self.directions = nn.Parameter(f.directions.T.clone()) if plan.kept_directions else None
        self.mean = nn.Parameter(f.mean) if plan.kind == "principal" else None
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, z: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the logits from what crossed, ``[B, L, width]``."""
        if self.mean is not None:
            hidden = z @ self.directions.T + self.mean  # type: ignore[union-attr]
        else:
            hidden = z if self.second is None else self._second_half(z)
        mask = self.view.mask(hidden, lengths)
        for layer in self.layers:
            hidden = self.view.run(layer, hidden, mask)
        logits: Tensor = self.head(hidden, lengths)
        return logits

    def _second_half(self, z: Tensor) -> Tensor:
        extra = self.view.hidden if self.plan.residual == "keep" else self.plan.kept_directions
        main, rest = z.split([self.width - extra, extra], dim=-1)
        u = main if self.plan.kind == "ffn" else main @ self.u.T + self.bias
        y: Tensor = self.dropout(self.second(self.activation(u)))  # type: ignore[misc]
        if self.plan.residual == "keep":
            y = y + rest
        elif self.directions is not None:
            y = y + rest @ self.directions.T
        return y if self.after is None else self.after(y)


def by_role(front: Front, back: Back) -> dict[str, Front | Back]:
    """Return the halves under "edge" and "cloud", as their plan places them."""
    return {"edge": front, "cloud": back} if front.plan.front_on == "edge" else {"edge": back, "cloud": front}


def check_holder(half: Front | Back, role: str) -> None:
    due = Front if half.plan.front_on == role else Back
    if not isinstance(half, due):
        raise ValueError(
            f"front_on={half.plan.front_on!r} gives the {role} the {due.__name__.lower()}: this is the "
            f"{type(half).__name__.lower()}"
        )


Sample = tuple[Mapping[str, Tensor], Tensor | None]
"""A front's inputs: tensors by name, and lengths [B] (None: no padding)."""


def split_model(model: nn.Module, plan: SplitPlan, samples: Iterable[Sample] | None = None) -> tuple[Front, Back]:
    """Cut a copy of a model.

    Args:
        model: of transformers, of a class with a view in ``split.models``; it is not changed.
        plan: where and how to cut.
        samples: batches of inputs, for kind "principal", ``init="activation"`` and ``residual="lowrank:q"``.

    Raises:
        ValueError: the model cannot be cut like this, or a parameter would belong to both halves.
    """
    view = view_of(model)
    plan.check(len(view.layers(model)), view.hidden)
    if not view.uses_lengths and "pack" in plan.up + plan.down:
        raise ValueError(f"a {view.model_type} has no padding: leave the codec pack out")
    _refuse_tied(model)
    model = copy.deepcopy(model)
    if plan.kind == "boundary":
        return assemble(view, model, plan, Factors.empty(0, 0, 0, 0))
    if plan.kind == "principal":
        mean, moment, _ = _moments(view, model, plan, samples)
        turned = rotation(plan.rank) @ principal_directions(moment - torch.outer(mean, mean), plan.rank)
        like = next(p for p in model.parameters() if p.is_floating_point())
        empty = replace(Factors.empty(0, 0, 0, 0), directions=turned.to(like), mean=mean.to(like))
        return assemble(view, model, plan, empty)
    first = view.parts(view.layers(model)[plan.cut - 1]).first
    weight = dense_weight(first).detach()
    moment_a = moment_x = None
    if plan.calibrated:
        _, moment_a, moment_x = _moments(view, model, plan, samples)
    u, s, v = factorise(weight, plan.rank if plan.kind == "lowrank" else 1, moment_x if plan.init != "svd" else None)
    q = plan.kept_directions
    kept = weight.new_empty(0, view.hidden) if moment_a is None else principal_directions(moment_a, q).to(weight.dtype)
    return assemble(view, model, plan, Factors(u, s, v, kept, kept.new_zeros(view.hidden)))


def assemble(view: View, model: nn.Module, plan: SplitPlan, factors: Factors) -> tuple[Front, Back]:
    """Distribute the modules of a model over the two halves; the model must not be used afterwards."""
    layers = list(view.layers(model))
    parts = None if plan.whole_layers else view.parts(layers[plan.cut - 1])
    own = plan.cut if parts is None else plan.cut - 1
    front = Front(view, plan, view.embeddings(model), layers[:own], parts, factors)
    back = Back(view, plan, layers[plan.cut :], parts, view.head(model), factors)
    return front, back


def _refuse_tied(model: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter has two names: each side could train its own copy of it."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name:
            raise ValueError(
                f"{names[id(parameter)]} and {name} are one parameter, which both halves would own: build the model "
                "with tie_word_embeddings=False"
            )


def _moments(
    view: View, model: nn.Module, plan: SplitPlan, samples: Iterable[Sample] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means over real tokens of a, a^T a and x^T x, fp64: a residual stream, x dense input."""
    why = "init='activation'" if plan.init == "activation" else f"residual={plan.residual!r}"
    why = "kind='principal'" if plan.kind == "principal" else why
    if samples is None:
        raise ValueError(f"{why} needs sample batches: pass samples=[(inputs, lengths), ...]")
    front, _ = assemble(view, copy.deepcopy(model), plan, Factors.empty(0, 0, 0, 0))
    front.eval()
    sums = [torch.zeros(view.hidden, view.hidden, dtype=torch.float64) for _ in range(2)]
    mean = torch.zeros(view.hidden, dtype=torch.float64)
    tokens = 0
    with torch.no_grad():
        for inputs, lengths in samples:
            found = front.activations(inputs, lengths)
            batch, length = found[0].shape[:2]
            real = torch.arange(length) < (torch.full((batch,), length) if lengths is None else lengths.cpu())[:, None]
            for total, value in zip(sums, found):
                rows = value[real.to(value.device)].double()
                total += (rows.T @ rows).cpu()
            mean += found[0][real.to(found[0].device)].double().sum(0).cpu()
            tokens += int(real.sum())
    if not tokens:
        raise ValueError(f"{why} needs sample batches: samples is empty")
    return mean / tokens, sums[0] / tokens, sums[1] / tokens


@dataclass(frozen=True)
class Half:
    role: str  # "edge" or "cloud"
    module: Front | Back
    plan: SplitPlan  # with which it was cut
    pair: str  # a hash over both halves, which the two ends compare
    notes: dict[str, Any]  # what else was saved with it, such as the task


def prepare(
    model: nn.Module, plan: SplitPlan, directory: str | Path, samples: Iterable[Sample] | None = None,
    notes: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Cut a model once and write ``edge.safetensors`` and ``cloud.safetensors``, each end's half by the plan.

    Args:
        model, plan, samples: as for ``split_model``.
        directory: created if needed.
        notes: small JSON values to store in both files.

    Returns:
        The pair's id.

    Raises:
        ValueError: the model cannot be cut like this, or safetensors is not installed.
    """
    require("safetensors")
    halves = by_role(*split_model(model, plan, samples))
    pair = _pair_id(plan, halves)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = model.config
    for role, half in halves.items():
        facts = {
            "role": role, "plan": plan.to_json(), "pair": pair, "class": type(model).__name__,
            "config": config.to_dict(), "notes": notes or {},
        }  # fmt: skip
        write_half(half, facts, folder / f"{role}.safetensors")
    return pair


def write_half(half: nn.Module, facts: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in _tensors(half).items()}
    save_file(tensors, path, metadata={"thinwire": json.dumps(facts, default=str)})


def half_file(path: str | Path, role: str) -> Path:
    """Return the path itself, or the half's file in a directory written by ``prepare``."""
    return Path(path) / f"{role}.safetensors" if Path(path).is_dir() else Path(path)


def read_facts(path: str | Path, role: str | None = None) -> dict[str, Any]:
    """Read the facts of a file, without its tensors; ``role``: which half is expected, None: either."""
    require("safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {})["thinwire"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a half of a model: thinwire split plan --out writes them ({error})") from error
    if not isinstance(facts, dict) or not {"role", "plan", "pair", "class", "config", "notes"} <= facts.keys():
        raise ValueError(f"{path} is not a half of a model: thinwire split plan --out writes them")
    if role not in (None, facts["role"]):
        raise ValueError(f"{path} is the half of the {facts['role']}, not of the {role}")
    return facts


def load_half(path: str | Path, role: str) -> Half:
    """Build a half from its file, or the directory that holds it; ``role``: which half is expected.

    No memory is allocated for the rest of the model.

    Raises:
        ValueError: it is not such a file.
    """
    file = half_file(path, role)
    facts = read_facts(file, role)
    from safetensors.torch import load_file

    plan = SplitPlan.from_json(facts["plan"])
    with torch.device("meta"):
        model = build(facts["class"], facts["config"])
        view = view_of(model)
        plan.check(len(view.layers(model)), view.hidden)
        rank = plan.rank if plan.kind == "lowrank" else 1
        factors = Factors.empty(view.intermediate, view.hidden, rank, plan.kept_directions)
        half = by_role(*assemble(view, model, plan, factors))[role]
    tensors = load_file(str(file))
    half.to_empty(device="cpu")
    wanted = _tensors(half)
    if wanted.keys() != tensors.keys() or any(wanted[name].shape != tensors[name].shape for name in wanted):
        raise ValueError(f"{file} does not hold the tensors that its plan and configuration ask for")
    first = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    half.to(first.dtype)
    with torch.no_grad():
        for name, tensor in _tensors(half).items():
            tensor.copy_(tensors[name])
    return Half(role, half, plan, facts["pair"], facts["notes"])


def _tensors(half: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers, including those that ``state_dict`` leaves out."""
    return {**dict(half.named_parameters()), **dict(half.named_buffers())}


def _pair_id(plan: SplitPlan, halves: dict[str, Front | Back]) -> str:
    made = hashlib.blake2b(plan.to_json().encode(), digest_size=16)
    for role, half in halves.items():
        for name, tensor in sorted(_tensors(half).items()):
            made.update(f"{role}:{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
