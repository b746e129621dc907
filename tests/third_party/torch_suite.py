"""Runs the DDP tests that ship with torch on Gloo ranks and a CPU: as they are, then with thinwire in each.

That is with our hook in every DDP, or with ``Attached`` in DDP's place.
"""

import contextlib
import importlib
import inspect
import os
import re
import traceback
import unittest
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import thinwire as tw
from thinwire.engine.services import handles

PATIENCE = 60  # seconds for a rank whose peer has failed


def _is_device(x):
    """What those tests write for "my GPU"."""
    return (isinstance(x, int) and not isinstance(x, bool)) or (isinstance(x, (str, torch.device)) and "cuda" in str(x))


class OnCPU(TorchFunctionMode):
    """Tensors that a test wants on its rank's GPU stay on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = args[0], *("cpu" if _is_device(x) else x for x in args[1:])
        return func(*args, **kwargs)


def _without_gpus():
    """Calls that move a model or wait for a GPU do nothing, and no test is skipped for the number of GPUs."""
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}
    to = nn.Module.to

    def stay(self, *args, **kwargs):
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return to(self, *("cpu" if _is_device(x) else x for x in args), **kwargs)

    nn.Module.cuda, nn.Module.to = (lambda self, *_, **__: self), stay
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.amp.GradScaler = partial(torch.amp.GradScaler, "cpu")


@contextlib.contextmanager
def _every_ddp(hooked):
    """DDPs that are made or unpickled here are on no GPU and, if so wished, have our hook from the start."""
    made, read = DistributedDataParallel.__init__, DistributedDataParallel.__setstate__

    def init(self, *args, device_ids=None, output_device=None, **kwargs):
        made(self, *args, **kwargs)
        if hooked:
            self.register_comm_hook(*tw.ddp_hook("ssgd", process_group=self.process_group, timeout=PATIENCE))

    def setstate(self, state):
        read(self, state)
        if hooked:
            self.register_comm_hook(*tw.ddp_hook("ssgd", process_group=self.process_group, timeout=PATIENCE))

    DistributedDataParallel.__init__, DistributedDataParallel.__setstate__ = init, setstate
    try:
        yield
    finally:
        DistributedDataParallel.__init__, DistributedDataParallel.__setstate__ = made, read


class Attached(nn.Module):
    """What DDP is to a script, by ``attach``: calls go to the module, whose gradients are averaged in its backward."""

    def __init__(
        self, module, device_ids=None, output_device=None, process_group=None, broadcast_buffers=True,
        bucket_cap_mb=None, find_unused_parameters=False, gradient_as_bucket_view=False, static_graph=False,
        forward_sync_buffers=None,
    ):  # fmt: skip
        super().__init__()
        self.module = module
        self.forward_sync_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.options = {
            "process_group": process_group, "broadcast_buffers": self.forward_sync_buffers,
            "bucket_cap_mb": bucket_cap_mb, "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }  # fmt: skip
        self.attach()

    def attach(self):
        for handle in handles():
            if not {*handle.services.model.modules()}.isdisjoint(self.module.modules()):
                handle.close()
        self.__dict__["handle"] = tw.attach(self.module, None, "ssgd", timeout=PATIENCE, **self.options)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        return self.handle.no_sync()

    def _set_static_graph(self):
        """A hint to DDP, which ``attach`` needs none of."""

    def __getstate__(self):
        return {name: x for name, x in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.attach()


@contextlib.contextmanager
def _in_the_place_of_ddp():
    """Who makes a DistributedDataParallel gets an ``Attached``; what is left open is closed."""
    DistributedDataParallel.__new__ = lambda cls, *args, **kwargs: Attached(*args, **kwargs)
    try:
        yield
    finally:
        DistributedDataParallel.__new__ = lambda cls, *_, **__: object.__new__(cls)  # once set, it cannot be deleted
        for handle in handles():
            handle.close()


def _about_ddp(tests):
    """The tests that make a DistributedDataParallel, themselves or in what they call."""
    text = {n: inspect.getsource(f) for n, f in vars(tests).items() if inspect.isfunction(f)}

    def makes_one(name, above=()):
        called = re.findall(r"self\.(_\w+)\(", text.get(name, ""))
        return "DistributedDataParallel(" in text.get(name, "") or any(
            makes_one(n, (*above, name)) for n in called if n not in above and n != name
        )

    return [name for name in text if name.startswith("test_") and makes_one(name)]


def _outcome(case, name):
    try:
        with OnCPU():
            getattr(case, name)()
        return "ok"
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as left:
        return f"skipped: exit {left.code}"
    except BaseException:
        return traceback.format_exc()


def play(rank, size, folder, wanted, left_out):
    """{test: {way: the ranks' outcomes}}, plain first; a test that fails plain, as some need GPUs, is not tried again.

    Args:
        folder: for the files that ranks meet in.
        wanted: names for each of "hook" and "attach"; None: all that are about DDP.
        left_out: names for each.
    """
    os.environ.update(BACKEND="gloo", INIT_METHOD=f"file://{folder}/unused", TEMP_DIR=folder)
    try:
        _without_gpus()
        suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    tests = suite.DistributedTest._DistTestBase
    case_type = type("Case", (suite.TestDistBackend, tests), {})
    board, found = dist.FileStore(f"{folder}/board", size), {}
    wanted = wanted or dict.fromkeys(left_out, _about_ddp(tests))
    ways_of = {}
    for way, names in wanted.items():
        for name in names:
            if name not in left_out[way] and hasattr(tests, name):
                ways_of.setdefault(name, ["plain"]).append(way)
    for name, ways in ways_of.items():
        found[name] = {}
        for way in ways:
            place = os.path.join(folder, f"{name}-{way}")
            for inner in ("barrier", "test_dir", "init_dir"):
                os.makedirs(os.path.join(place, inner), exist_ok=True)
            os.environ["TEMP_DIR"] = place
            os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # some tests leave it at DETAIL, where torch dies of them
            dist.set_debug_level_from_env()
            suite.Barrier.barrier_id = 0
            torch.manual_seed(0)
            case = case_type(name)
            case.rank, case.file_name = rank, f"{place}/store"
            dist.init_process_group(
                "gloo", f"file://{place}/store", timedelta(seconds=PATIENCE), rank=rank, world_size=size
            )
            ddps = _in_the_place_of_ddp() if way == "attach" else _every_ddp(way == "hook")
            printed = open(f"{place}/printed-{rank}", "w")  # noqa: SIM115
            with printed, contextlib.redirect_stdout(printed), ddps:
                board.set(f"{place}/{rank}", _outcome(case, name))
            found[name][way] = [board.get(f"{place}/{r}").decode() for r in range(size)]
            dist.destroy_process_group()
            if set(found[name]["plain"]) != {"ok"}:
                break
    return found
