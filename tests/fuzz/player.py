"""What the ranks do with a script: the model under ``attach``, and beside it plain twins of both ranks' models.

Every rank computes both ranks' passes with the twins, so what an exchange must give is known without any exchange.
"""

import contextlib
import copy
import functools
import gc
import hashlib
import io
import warnings
from pathlib import Path, PurePosixPath

import numpy as np
import thinwire.checkpoint
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from fuzz.models import Buffers, Cast, Failure, Raises, build, loss_of
from thinwire.engine.services import attached_to

LOCAL = ("local", "diloco")
CODECS = {
    "topk": tw.TopK(0.1),
    "powersgd": tw.PowerSGD(rank=2, min_rate=1.0),
    "acp": tw.ACP(rank=2, min_rate=1.0),
}


def _decay(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(0.99)


def _replace(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data.clamp(-0.5, 0.5)


FOREIGN = {"decay": _decay, "replace": _replace}  # hooks of others that write weights after a step


class Mismatch(AssertionError):
    """The model under ``attach`` is not as its twin."""


class TwoStep(torch.optim.Optimizer):
    """An optimizer in SAM's manner: its update is another optimizer's step, and its own ``step`` is never called."""

    def __init__(self, params, base):
        super().__init__(params, {})
        self.base = base
        self.param_groups = base.param_groups


@functools.cache
def alone_group():
    """A process group of this rank alone, once a process."""
    return torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)


def optimizers_of(case, net):
    """The script's optimizers: what it steps, and what it gives to ``attach``."""
    made, parameters = [], list(net.parameters())
    for spec in case["optimizers"]:
        some = {"all": parameters, "even": parameters[::2], "odd": parameters[1::2]}[spec["part"]]
        made.append(getattr(torch.optim, spec["kind"])(some, **spec["options"]))
        if "foreign" in case:
            made[-1].register_step_post_hook(FOREIGN[case["foreign"]])
    given = [TwoStep(list(net.parameters()), made[0])] if case.get("two-step") else made
    return made, given if len(given) > 1 else given[0]


def scaler_of(case):
    return torch.amp.GradScaler("cpu", **case["scaler"]) if case.get("scaler") else None


def tensors_of(net):
    """All parameters and buffers by name, as they are; of sharded ones this rank's part."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    here = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in net.named_parameters()}
    return here | {f"buffer {name}": b for name, b in net.named_buffers()}


def tensor_of(net, name):
    return dict(net.named_buffers()).get(name, dict(net.named_parameters()).get(name))


def digest(tensors):
    found = hashlib.blake2b(digest_size=8)
    for x in tensors:
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def difference(real, wanted):
    """None if two tensors are equal, NaN included; else in words."""
    if real is None or wanted is None:
        return None if real is wanted else f"{_short(real)} instead of {_short(wanted)}"
    if (real.dtype, real.shape) != (wanted.dtype, wanted.shape):
        return f"{real.dtype} {list(real.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    real, wanted = real.detach(), wanted.detach()
    if torch.equal(real, wanted):
        return None
    a, b = real.double(), wanted.double()
    apart = (a != b) & ~(a.isnan() & b.isnan())
    if not apart.any():
        return None
    most = float((a - b)[apart].abs().max())
    return f"{_short(real[apart])} instead of {_short(wanted[apart])}, largest difference {most:.3g}"


def _short(x):
    return "None" if x is None else str([float(f"{float(v):.6g}") for v in x.reshape(-1)[:3].double()])


def close(real, wanted, share):
    """The same for values that may differ by a share of the largest."""
    text = difference(real, wanted)
    if text is None or real is None or wanted is None or real.dtype != wanted.dtype:
        return text
    a, b = real.detach().double(), wanted.detach().double()
    scale = float(b.abs().max().nan_to_num(0, 0, 0)) if b.numel() else 0.0
    return None if torch.allclose(a, b, rtol=0, atol=share * max(scale, 1e-6), equal_nan=True) else text


@torch.no_grad()
def put(x, value):
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        x.set_(value.clone())
    else:
        x.data.copy_(value)


class Player:
    """One rank's life in one script; both kinds of methods derive from it.

    Args:
        case: the script.
        rank: of this process.
        folder: a directory that both ranks share.
    """

    def __init__(self, case, rank, folder):
        self.case, self.rank, self.folder = case, rank, Path(folder)
        self.number, self.marks, self.loose = 0, [], False
        self.options = case["options"]

    # --- the script's own objects ----------------------------------------------------------------------------------

    def begin(self):
        self.make(self.case["seed"] + 1000 * self.rank)  # the ranks begin apart: rank 0's weights are to be taken
        self.twins = [build(self.case["model"], self.case["seed"]) for _ in range(2)]
        other = build(self.case["model"], self.case["seed"] + 1000)
        theirs = dict(other.named_buffers()) | dict(other.named_parameters())
        for name in self.ignored():
            put(tensor_of(self.twins[1], name), theirs[name])
        self.begin_twins()
        self.attach()
        self.look()

    def make(self, seed):
        self.net = build(self.case["model"], seed)
        self.optimizers, self.given = optimizers_of(self.case, self.net)
        self.scaler = scaler_of(self.case)

    def attach(self, **options):
        attach = dict(self.case.get("attach", {})) | options
        if attach.pop("scaler", False):
            attach["scaler"] = self.scaler
        if (rule := attach.get("keep_dense")) == "short":
            attach["keep_dense"] = lambda name, p: p.numel() < 40
        elif rule == "all":
            attach["keep_dense"] = lambda name, p: True
        if attach.pop("apart", False):
            attach.setdefault("topology", tw.Topology(2, 1))
        if attach.pop("ignore", False) or "private" in self.case:
            attach["ignore"] = self.ignored()
        self.keep_dense = attach.get("keep_dense", "auto")
        given = None if self.case.get("no optimizer") else self.given
        self.sync = self.attached(given, timeout=20, **attach)
        if "unkept" in self.case:
            self.sync = None
            gc.collect()
            self.sync = attached_to(self.net)
            if self.sync is None:
                raise Mismatch("the handle of attach is gone, because the script does not keep it")

    def attached(self, given, **options):
        return tw.attach(self.net, given, self.method(), **self.extra(), **options)

    def save(self, folder, place):
        tw.checkpoint.save(folder, self.net, self.step_of(), self.sync, place)

    def load(self, folder, place):
        return tw.checkpoint.load(folder, self.net, self.step_of(), self.sync)

    def ignored(self):
        """Names of the buffers, or of a layer's parameters, that are each rank's own."""
        if "private" in self.case:
            return [f"last.{key}" for key, _ in self.net.last.named_parameters()]
        modules = self.net.named_modules() if self.case.get("attach", {}).get("ignore") else ()
        return [f"{name}.{key}" for name, m in modules if isinstance(m, Buffers) for key, _ in m.named_buffers()]

    def method(self):
        return self.case["method"]

    def extra(self):
        found = {k: CODECS.get(v, v) if k == "codec" else v for k, v in self.options.items()}
        if "averaged" in self.case:
            found["average_buffers"] = [n for n, b in self.net.named_buffers() if b.is_floating_point()]
        return found

    # --- events ----------------------------------------------------------------------------------------------------

    def play(self, first):
        """Play the events from a place on. Returns where to go on in another process, or None at the end."""
        for place, event in enumerate(self.case["events"][first:], first):
            self.place = place
            getattr(self, event["do"])(event)
            if event["do"] == "restart":
                return place
        self.place = "the end"
        self.end()
        self.sync.close()
        return None

    def end(self):
        pass

    @contextlib.contextmanager
    def autocast(self, event, *parts):
        with torch.autocast("cpu", torch.bfloat16) if event.get("autocast") in parts else contextlib.nullcontext():
            yield

    def passed(self, net, rank, event, number, *, by_hand=False, scaler=None):
        """One pass of a model: forward and backward, or gradients by hand."""
        with self.autocast(event, "forward", "all"):
            loss = loss_of(net, self.case, rank, number)
        if event.get("inf") == rank and number == self.number:
            loss = loss * torch.inf
        if scaler is not None:
            loss = scaler.scale(loss)
        if by_hand:
            parameters = [p for p in net.parameters() if p.requires_grad]
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if g is not None:
                    p.grad = g.to(p.grad_dtype or p.dtype) if p.grad is None else p.grad + g
        else:
            with self.autocast(event, "all"):
                loss.backward()

    def zero(self, how, net, optimizers):
        if how == "by hand":
            for p in net.parameters():
                p.grad = None
        elif how == "model":
            net.zero_grad()
        elif how != "keep":
            for o in optimizers:
                o.zero_grad(set_to_none=how == "none")

    def rate(self, event, optimizers):
        """Set the learning rate as a schedule does, perhaps with a NumPy number."""
        if "rate" in event:
            value = {"numpy": np.float64, "float": float}[event["rate"][1]](event["rate"][0])
            for o in optimizers:
                for group in o.param_groups:
                    group["lr"] = value

    def evaluation(self, event):
        """Evaluate, on some ranks, perhaps with batch statistics."""
        self.number += 1
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": contextlib.nullcontext}
        for net, rank in self.everyone():
            if rank in event["who"]:
                net.train(event.get("batch statistics", False))
                with modes[event["mode"]]():
                    loss_of(net, self.case, rank, self.number)
                net.train()

    def everyone(self):
        """The attached model and the twins, each with its rank."""
        return [(self.net, self.rank), (self.twins[0], 0), (self.twins[1], 1)]

    def freeze(self, event):
        self._toggle(event["which"], False)

    def thaw(self, event):
        self._toggle(event["which"], True)

    def _toggle(self, which, wanted):
        names = [n for n, _ in self.net.named_parameters() if n in self.trainable and not n.startswith("last.")]
        for net, _ in self.everyone() if names else ():
            dict(net.named_parameters())[names[which % len(names)]].requires_grad_(wanted)

    @torch.no_grad()
    def write(self, event):
        """The script changes weights: clamps them through .data, or in place."""
        self.settle()
        for net, _ in self.everyone():
            for p in net.parameters():
                if event["how"] == "data":
                    p.data.clamp_(-0.4, 0.4)
                elif event["how"] == "swap":
                    p.data = p.data * 0.9
                else:
                    p.mul_(0.9)

    def target(self, event):
        """A momentum encoder: frozen parameters follow, on every rank by its own values."""
        self.settle()  # one may have been frozen before its last update was made
        with torch.no_grad():
            for net, rank in self.everyone():
                for p in net.parameters():
                    if not p.requires_grad and p.is_floating_point():
                        p.mul_(0.9).add_(0.05 * (rank + 1 if self.case["method"] in LOCAL else 1))

    def copy(self, event):
        """A copy of the attached model is not attached, and holds its values."""
        self.settle()
        if event["how"] == "script":
            linear = next(m for m in self.net.modules() if type(m) is nn.Linear)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.jit.script(copy.deepcopy(linear))
            return
        if event["how"] == "save":
            torch.save(self.net, file := io.BytesIO())
            if b"thinwire" in file.getvalue():
                raise Mismatch("a file of the model cannot be read where thinwire is not installed")
            file.seek(0)
            other = torch.load(file, weights_only=False)
        else:
            other = copy.deepcopy(self.net)
        for name, x in tensors_of(self.net).items():
            self.check("copy", name, tensors_of(other)[name], x)
        if self.rank in event["who"]:  # by itself: nothing is exchanged
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            loss_of(other, self.case, self.rank, self.number).backward()
            optimizer.step()

    def refuse(self, event):
        """Something that ``attach`` must refuse, on both ranks, before anything is trained with it."""
        net = nn.Linear(4, 3)
        if event["what"] == "ddp":
            net = nn.ModuleDict({"inner": DistributedDataParallel(net)})
        else:
            kind = {"bf16": (torch.bfloat16, torch.float16), "wide": (torch.float32, torch.float64)}[event["kinds"]]
            value = torch.ones(4, dtype=kind[self.rank])
            if event["what"] == "buffer":
                net.register_buffer("differs", value)
            else:
                net.differs = nn.Parameter(value, requires_grad=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        try:
            tw.attach(net, optimizer, self.method(), timeout=20, **self.extra()).close()
        except (TypeError, ValueError):
            return
        raise Mismatch(f"accepted: {event['what']}")

    def raises(self, event):
        """An exception in the loop, on both ranks; what the script then does is in ``again``."""
        self.settle()
        self.number += 1
        begun = False
        for net, rank in self.everyone():
            try:
                loss = loss_of(net, self.case, rank, self.number)
                if event["where"] == "backward":
                    Raises.armed = True
                    loss.backward()
                raise Failure("in the loop")
            except Failure:
                Raises.armed = False
            begun |= any(p.grad is not None for p in net.parameters())
        for net, _ in self.everyone():
            self.zero("by hand", net, ())
        if event["where"] == "forward":
            return
        self.interrupted(begun)
        self.reattach({"state": True})

    def reattach(self, event):
        """Close and attach again, with the state or without."""
        self.settle()
        for net, _ in self.everyone():  # torch loads nothing into what inference_mode has left in a buffer's place
            for module in net.modules():
                for key, x in list(module.named_buffers(recurse=False)):
                    if x.is_inference():
                        setattr(module, key, x.clone())
        state = self.sync.state_dict() if event["state"] else None
        own = copy.deepcopy(self.net.state_dict())
        self.sync.close()
        self.attach(**({"scaler": True} if self.scaler is not None and event["state"] else {}))
        if state is not None and self.case["method"] in LOCAL:
            self.net.load_state_dict(own)  # attach has taken rank 0's
        self.attached_again(event["state"])
        if state is not None:
            self.sync.load_state_dict(state)
        self.look()

    def unsaveable(self, event):
        """What a checkpoint cannot hold is refused before anything is written, on both ranks."""
        self.settle()
        group = self.optimizers[0].param_groups[0]
        group["origin"] = PurePosixPath("somewhere")
        try:
            tw.checkpoint.save(self.folder / "refused", self.net, self.step_of(), self.sync, 1)
        except (OSError, TypeError, ValueError):
            return
        finally:
            del group["origin"]
        raise Mismatch("accepted: an optimizer's state that no load can read")

    def restart(self, event):
        """Save, to go on in another process: see ``resume``."""
        self.settle()
        if "freeze" in event:
            self._toggle(event["freeze"], False)
        self.rate(event, [*self.optimizers, *self.twin_optimizers()])
        self.save(self.folder, self.place)
        mine = {"twin": self.pack(), "number": self.number, "scaler": self.scaler and self.scaler.state_dict()}
        mine["frozen"] = [name for name, p in self.net.named_parameters() if not p.requires_grad]
        torch.save(mine, self.folder / f"twin-{self.place}-{self.rank}")
        self.sync.close()

    def reload(self, event):
        """The same in this process."""
        self.restart(event)
        self.resume(self.place)

    def elsewhere(self, event):
        """At the end: one rank goes on from what two have saved, and two from what one has saved."""
        self.settle()
        if self.case["method"] in LOCAL:
            self.finish({})
        folder, alone = self.folder / "elsewhere", alone_group()
        tw.checkpoint.save(folder, self.net, self.step_of(), self.sync, 1)
        before, owed = {n: x.detach().clone() for n, x in tensors_of(self.net).items()}, self.owed()
        self.sync.close()
        self.make(self.case["seed"] + 99)
        self.attach(process_group=alone, topology=tw.Topology(1))
        tw.checkpoint.load(folder, self.net, self.step_of(), self.sync)
        self._same_elsewhere(before, "one rank")
        again = self.folder / f"again {self.rank}"
        tw.checkpoint.save(again, self.net, self.step_of(), self.sync, 2)
        self.sync.close()
        self.make(self.case["seed"] + 98 + self.rank)
        self.attach()
        tw.checkpoint.load(self.folder / "again 0", self.net, self.step_of(), self.sync)
        self._same_elsewhere(before, "two ranks again")
        for name, x in self.owed().items():
            if name in owed and (text := close(x, owed[name], 1e-5)) is not None:
                raise Mismatch(f"what is owed to {name} after one rank, and two: {text}")

    def owed(self):
        """The mean of the residuals over both ranks, by name."""
        saved, found = self.sync.state_dict(), {}
        for key in sorted(saved):
            if key.startswith(f"residual/{self.rank}/") and f"offset{key.removeprefix('residual')}" not in saved:
                x = saved[key].double().clone()
                torch.distributed.all_reduce(x)
                found[key.split("/", 2)[2]] = x / 2
        return found

    def _same_elsewhere(self, before, where):
        for name, x in tensors_of(self.net).items():
            own = name.startswith("buffer ") and not self.case.get("attach", {}).get("broadcast_buffers", True)
            if not own:
                self.check(f"on {where} the value", name, x, before[name])

    def step_of(self):
        return self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]

    def resume(self, place):
        """Go on in this process after ``restart`` in another one."""
        saved = torch.load(self.folder / f"twin-{place}-{self.rank}", weights_only=False)
        self.make(self.case["seed"] + 77 + self.rank)
        for name, p in self.net.named_parameters():
            p.requires_grad_(p.requires_grad and name not in saved["frozen"])
        self.place, self.number = place, saved["number"]
        self.unpack(saved["twin"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        own = {name: x.detach().clone() for name, x in self.twins[1].named_buffers()}
        self.attach(**({"scaler": True} if self.scaler is not None else {}))
        if not self.case.get("attach", {}).get("broadcast_buffers", True):
            for name, x in own.items():
                put(tensor_of(self.twins[1], name), x)  # attach has sent rank 0's, and the checkpoint has each one's
        found = self.load(self.folder, place)
        if found != place:
            raise Mismatch(f"the checkpoint of {place} was loaded as {found}")
        self.attached_again(True, fresh=True)
        self.look()

    def unpack(self, saved):
        for key, value in saved.items():
            setattr(self, key, value)
        for net in self.twins:
            for module in net.modules():
                if isinstance(module, Cast):
                    module.take_grads_in()

    def through_a_file(self, optimizers, net):
        """What ``state_dict`` and ``load_state_dict`` make of optimizers; torch casts some of their numbers there."""
        made, _ = optimizers_of(self.case, net)
        for new, old in zip(made, optimizers, strict=True):
            new.load_state_dict(old.state_dict())
        return made

    # --- comparisons -----------------------------------------------------------------------------------------------

    def check(self, what, name, real, wanted, share=0.0):
        text = close(real, wanted, share) if share else difference(real, wanted)
        if text is not None:
            raise Mismatch(f"{what} of {name}: {text}")

    def mark(self, what, tensors):
        """Note what must be equal on all ranks."""
        self.marks.append((str(self.place), what, digest(tensors)))

    def settle(self):
        """Make updates that wait, before the script reads or writes weights."""

    def interrupted(self, begun):
        """A backward ended with an exception."""
