"""thinwire: train deep networks over thin wires.

Names are loaded when first used, so that ``import thinwire`` and the command line start without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "GradientSync": "engine.sync",
    "Local": "local.settings",
    "LocalSync": "engine.local_sync",
    "LocalWorld": "program.local_world",
    "Method": "program.method",
    "Nesterov": "local.settings",
    "Plan": "program.plan",
    "QSR": "local.settings",
    "Stats": "engine.stats",
    "StepLog": "report.log",
    "Topology": "program.topology",
    "attach": "engine.attach",
    "chain": "methods.chain",
    "ddp_hook": "adapters.ddp",
    "method": "methods.registry",
}
_PACKAGES = (
    "adapters",
    "bench",
    "checkpoint",
    "collectives",
    "data",
    "engine",
    "federated",
    "kernels",
    "kfac",
    "lab",
    "methods",
    "optim",
    "parameter_server",
    "planner",
    "program",
    "split",
    "supernet",
)

if TYPE_CHECKING:
    from thinwire.adapters.ddp import ddp_hook
    from thinwire.engine.attach import attach
    from thinwire.engine.local_sync import LocalSync
    from thinwire.engine.stats import Stats
    from thinwire.engine.sync import GradientSync
    from thinwire.local.settings import QSR, Local, Nesterov
    from thinwire.methods.acp import ACP
    from thinwire.methods.cast import Cast
    from thinwire.methods.chain import chain
    from thinwire.methods.dgc import DGC
    from thinwire.methods.hitopk import HiTopK
    from thinwire.methods.lags import LAGS
    from thinwire.methods.powersgd import PowerSGD
    from thinwire.methods.qsgd import QSGD
    from thinwire.methods.registry import method
    from thinwire.methods.sign import SignSGD
    from thinwire.methods.sign import SignSGD as OneBit
    from thinwire.methods.ssgd import SSGD
    from thinwire.methods.ssgd import SSGD as DeAR
    from thinwire.methods.terngrad import TernGrad
    from thinwire.methods.topk import TopK
    from thinwire.methods.topk import TopK as GTopK
    from thinwire.methods.topk import TopK as OMGS
    from thinwire.methods.topk import TopK as OkTopk
    from thinwire.program.local_world import LocalWorld
    from thinwire.program.method import Method
    from thinwire.program.plan import Plan
    from thinwire.program.topology import Topology
    from thinwire.report.log import StepLog

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
    "chain",
    "ddp_hook",
    "method",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"thinwire.{_HOME[name]}"), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"thinwire.{name}")
    elif name in (methods := _methods()):
        value = importlib.import_module("thinwire.methods.registry").class_of(methods[name])
    else:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, *_methods()})


def _methods() -> dict[str, str]:
    """Return the classes of registered methods, which are names of this package: class -> name of the method."""
    found: dict[str, str] = importlib.import_module("thinwire.methods.registry").public()
    return found
