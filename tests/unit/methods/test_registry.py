import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

import thinwire as tw
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.registry import (
    METHODS,
    candidates,
    class_of,
    lossy_candidates,
    method,
    needed,
    public,
    resolve,
)
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.plans import RULES

NEEDED = {name: {"density": 0.01} for name in ("topk", "gtopk", "oktopk", "hitopk", "omgs")}
MERGES = {"omgs": "optimal", "lags": "auto"}


@pytest.mark.parametrize("name", METHODS)
def test_every_name_gives_a_frozen_method(name):
    made = method(name, **NEEDED.get(name, {}))
    assert made.name == name
    assert made == method(name.upper(), **NEEDED.get(name, {}))
    assert made.fusion == MERGES.get(name, "auto")
    assert set(made.options()) == {field.name for field in dataclasses.fields(made)}
    assert sum(made.payload([(64, 64), (3,)], 0)) > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.fusion = "none"


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_declares_holds_for_its_options(name):
    cls = class_of(name)
    for options in [*cls.candidates, *(cls.auto[1] if cls.auto else [])]:
        if set(needed(cls)) <= set(options):
            assert method(name, **options).exact == cls.exact
    assert cls.bucket_unit in ("gradient", "payload")
    assert cls.fusion_rule in ("", *RULES)
    assert set(cls.unfit) <= {"fsdp2", "federated", "local"}


def test_what_is_priced_unasked():
    assert lossy_candidates() == [
        ("cast", {"dtype": "bf16"}),
        ("cast", {"dtype": "int8"}),
        ("cast", {"dtype": "int4"}),
        ("acp", {"rank": 4}),
        ("powersgd", {"rank": 4}),
        ("topk", {"density": 0.01, "exchange": "auto"}),
        ("signsgd", {}),
    ]
    assert [name for name, _ in candidates()].count("topk") == 2
    assert not {"hitopk", "omgs"} & {name for name, _ in candidates()}


def test_a_method_that_cannot_be_decoupled_names_those_that_can():
    with pytest.raises(TypeError, match=r"powersgd cannot be decoupled: .*; ssgd, cast and acp can$"):
        method("powersgd", decoupled=True)


@pytest.mark.parametrize("cls", [tw.OneBit, tw.GTopK, tw.OkTopk, tw.DeAR, tw.OMGS])
def test_a_preset_is_a_class_like_any_other(cls):
    name = public()[cls.__name__]
    made = method(name, **NEEDED.get(name, {}))
    assert type(made) is cls is class_of(name)
    assert cls.name == name
    assert dataclasses.is_dataclass(cls)
    assert isinstance(made, cls.__mro__[1])
    assert pickle.loads(pickle.dumps(made)) == made
    assert type(dataclasses.replace(made, fusion="single")) is cls
    assert cls.__name__ in tw.__all__
    assert cls.__mro__[1].__name__ in cls.__doc__


def test_every_class_is_a_name_of_the_package():
    for cls, name in public().items():
        assert getattr(tw, cls) is class_of(name)
        assert cls in dir(tw)


def test_the_table_can_be_read_without_torch():
    program = "import sys, thinwire as t; assert 'GTopK' in dir(t); sys.exit(hasattr(t, 'x') or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == 0


def test_options_reach_the_method():
    assert method("acp", rank=8) == ACP(rank=8)
    assert Cast("fp16") == Cast(torch.float16) != Cast()


def test_resolve():
    acp = ACP()
    assert resolve(acp) is acp
    assert resolve("topk", density=0.1) == TopK(0.1)
    with pytest.raises(ValueError, match="move rank into it"):
        resolve(acp, rank=3)
