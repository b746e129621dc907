"""thinwire: train deep networks over thin wires.

Names are loaded when first used, so that ``import thinwire`` and the command line start without importing torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "GradientSync": "engine.sync",
    "Local": "engine.local.settings",
    "LocalSync": "engine.local.sync",
    "LocalWorld": "core.program.local_world",
    "Look": "engine.look",
    "Method": "core.program.method",
    "Nesterov": "engine.local.settings",
    "Plan": "core.program.plan",
    "QSR": "engine.local.settings",
    "Stats": "engine.stats",
    "StepLog": "tools.report.log",
    "Topology": "core.program.topology",
    "attach": "engine.attach",
    "ddp_hook": "adapters.ddp",
    "method": "core.methods.registry",
}
_SHORT = {
    "checkpoint": "engine.state.checkpoint",
    "measure": "predict.measure",
    **{name: f"core.{name}" for name in ("collectives", "kernels", "methods", "program")},
    **{
        name: f"systems.{name}"
        for name in ("data", "federated", "kfac", "optim", "parameter_server", "split", "supernet")
    },
    **{name: f"tools.{name}" for name in ("bench", "lab")},
}  # what is also found without its wing: thinwire.kfac is thinwire.systems.kfac
_PACKAGES = ("adapters", "engine", "predict", *_SHORT)


class _ShortNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``import thinwire.kfac`` gives the module ``thinwire.systems.kfac`` itself, not a copy of it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        first, dot, rest = rest.partition(".")
        if package != __name__ or first not in _SHORT:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=f"{package}.{_SHORT[first]}{dot}{rest}")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        short, module.__spec__ = module.__spec__.name, module.__spec__.loader_state  # its own again
        for name in [name for name in sys.modules if name.startswith(f"{module.__name__}.")]:
            sys.modules.setdefault(short + name.removeprefix(module.__name__), sys.modules[name])


sys.meta_path.insert(0, _ShortNames())

if TYPE_CHECKING:
    from thinwire import adapters, engine, predict  # noqa: F401
    from thinwire.adapters.ddp import ddp_hook
    from thinwire.core import collectives, kernels, methods, program  # noqa: F401
    from thinwire.core.methods.acp import ACP
    from thinwire.core.methods.cast import Cast
    from thinwire.core.methods.dgc import DGC
    from thinwire.core.methods.hitopk import HiTopK
    from thinwire.core.methods.lags import LAGS
    from thinwire.core.methods.powersgd import PowerSGD
    from thinwire.core.methods.qsgd import QSGD
    from thinwire.core.methods.registry import method
    from thinwire.core.methods.sign import SignSGD
    from thinwire.core.methods.sign import SignSGD as OneBit
    from thinwire.core.methods.ssgd import SSGD
    from thinwire.core.methods.ssgd import SSGD as DeAR
    from thinwire.core.methods.terngrad import TernGrad
    from thinwire.core.methods.topk import TopK
    from thinwire.core.methods.topk import TopK as GTopK
    from thinwire.core.methods.topk import TopK as OMGS
    from thinwire.core.methods.topk import TopK as OkTopk
    from thinwire.core.program.local_world import LocalWorld
    from thinwire.core.program.method import Method
    from thinwire.core.program.plan import Plan
    from thinwire.core.program.topology import Topology
    from thinwire.engine.attach import attach
    from thinwire.engine.local.settings import QSR, Local, Nesterov
    from thinwire.engine.local.sync import LocalSync
    from thinwire.engine.look import Look
    from thinwire.engine.state import checkpoint  # noqa: F401
    from thinwire.engine.stats import Stats
    from thinwire.engine.sync import GradientSync
    from thinwire.predict import measure  # noqa: F401
    from thinwire.systems import data, federated, kfac, optim, parameter_server, split, supernet  # noqa: F401
    from thinwire.tools import bench, lab  # noqa: F401
    from thinwire.tools.report.log import StepLog

__all__ = [
    "ACP",
    "DGC",
    "LAGS",
    "OMGS",
    "QSGD",
    "QSR",
    "SSGD",
    "Cast",
    "DeAR",
    "GTopK",
    "GradientSync",
    "HiTopK",
    "Local",
    "LocalSync",
    "LocalWorld",
    "Look",
    "Method",
    "Nesterov",
    "OkTopk",
    "OneBit",
    "Plan",
    "PowerSGD",
    "SignSGD",
    "Stats",
    "StepLog",
    "TernGrad",
    "TopK",
    "Topology",
    "attach",
    "ddp_hook",
    "method",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"thinwire.{_HOME[name]}"), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"thinwire.{_SHORT.get(name, name)}")
    elif name in (methods := _methods()):
        value = importlib.import_module("thinwire.core.methods.registry").class_of(methods[name])
    else:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, *_methods()})


def _methods() -> dict[str, str]:
    """Return the classes of registered methods, which are names of this package: class -> name of the method."""
    found: dict[str, str] = importlib.import_module("thinwire.core.methods.registry").public()
    return found
