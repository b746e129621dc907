"""What supernets cannot do: one sentence that says what to do instead."""

import random
import sys

import pytest
import torch
from supernet_nets import dots, shaken, tiny

import thinwire as tw
from thinwire.engine.executors.alone import run_alone
from thinwire.systems.supernet import ActiveReduce, ActiveSet, Evolution, Space, SubNet
from thinwire.systems.supernet.operators import ElasticBatchNorm
from thinwire.systems.supernet.stereo import (
    ElasticStereo,
    LatencyTable,
    Phase,
    RandomDots,
    StereoFiles,
    SupernetTrainer,
    build_table,
    calibrate,
    export,
    load_net,
    short,
    shrink,
)
from thinwire.systems.supernet.stereo.data import read_disparity, read_list, read_pfm
from thinwire.systems.supernet.stereo.evaluation import Calibrated
from thinwire.systems.supernet.stereo.training import adam

DATA = RandomDots(12, 24, 48, 9)
PHASE = {"name": "p", "space": Space(), "steps": 10, "lr": 1.0}
ELSEWHERE = Space().sample(random.Random(0))


def phases(net, *steps):
    return short(net.space, *(steps or (3, 4)))


def of_tiny(call):
    return lambda: call(tiny())


@pytest.mark.parametrize("call, says", [
    # a space and its sub-networks
    (lambda: Space(kernels=(3, 4)), "odd"), (lambda: Space(kernels=()), "kernels"),
    (lambda: Space(depths=(3, 2)), "ascending"), (lambda: Space(scales=(0, 2)), "positive"),
    (lambda: Space(refine_widths=(16,)), "together"),
    (lambda: Space().uniform(9, 2, 2, 2), "kernel 9"), (lambda: Space().uniform(3, 5, 2, 2), "depth 5"),
    (lambda: Space().uniform(3, 2, 3, 2), "expansion 3"), (lambda: Space().uniform(3, 2, 2, 5), "scales 5 is outside"),
    (lambda: Space((3,), (1,), (2,), (2,), (4, 8), (1, 3)).uniform(3, 1, 2, 2, (4, 2)), "refinement"),
    *((lambda text=text: SubNet.from_json(text), "not a sub-network")
      for text in ("{}", "[]", "nonsense", '{"stages": [[1]]}', '{"stages": 3}')),
    # the network
    (lambda: ElasticStereo(max_disparity=100), "multiple of 24"), (lambda: ElasticStereo(widths=(8, 16)), "4 stages"),
    (lambda: ElasticStereo(refine_width=31), "even"),
    (lambda: ElasticStereo(Space(refine_widths=(8, 16), refine_depths=(6,))), "end with refine_width=32"),
    (lambda: ElasticStereo(Space(refine_widths=(16, 32), refine_depths=(2,))), "end with 6"),
    (of_tiny(lambda net: net(torch.empty(1, 3, 20, 44), torch.empty(1, 3, 20, 44))),
     r"pad them to 24x48, for example with thinwire\.supernet\.stereo\.pad"),
    (of_tiny(lambda net: net(torch.empty(1, 3, 24, 48), torch.empty(1, 1, 24, 48))), r"\[B, 3, H, W\]"),
    *((of_tiny(lambda net, name=name: getattr(net, name)(ELSEWHERE)), "outside the space")
      for name in ("activate", "extract", "active_set")),
    *((lambda lacks=lacks: ElasticBatchNorm(4, **lacks)(torch.ones(2, 3, 4, 4)), "needs a momentum")
      for lacks in ({"momentum": None}, {"track_running_stats": False}, {"affine": False})),
    # what is reduced
    (lambda: ActiveSet.of({"a": (2,)}, {"b": None}), "differ"), (lambda: ActiveSet.union([]), "no sets"),
    (lambda: ActiveReduce(tw.PowerSGD(rank=2)), "powersgd"), (lambda: ActiveReduce(tw.ACP(rank=2)), "acp"),
    (lambda: ActiveReduce(tw.DeAR()), "ssgd"), (lambda: ActiveReduce(tw.HiTopK(density=0.1)), "hitopk"),
    (lambda: ActiveReduce("ssgd"), "must be a method"), (lambda: ActiveReduce(tw.SSGD(), divisor="half"), "divisor"),
    (lambda: ActiveReduce(tw.TopK(density=0.1), divisor="participants"), "exact"),
    # training
    *((lambda words=words: Phase(**{**PHASE, **words}), "phase p")
      for words in ({"steps": 0}, {"lr": 0.0}, {"sub_nets": 0}, {"flat": 99})),
    (of_tiny(lambda net: shrink(net, DATA, [Phase("p", Space(), 1, 1.0)])), "outside the space"),
    (of_tiny(lambda net: shrink(net, DATA, [*phases(net), *phases(net)])), "its own name"),
    (of_tiny(lambda net: shrink(net, dots(4)[:0], phases(net))), "empty"),
    (of_tiny(lambda net: run_alone(calibrate(net, net.space.smallest, []))), "at least one batch"),
    (of_tiny(lambda net: Calibrated(net, [], dots(4))), "at least one batch"),
    # search and latencies
    *((lambda words=words: Evolution(**words), "must be")
      for words in ({"population": 1}, {"generations": -1}, {"parents": 0.0}, {"mutate": 2.0})),
    *((lambda text=text: LatencyTable.from_json(text), "not a latency table") for text in ("{}", "no", "[]")),
    (of_tiny(lambda net: build_table(net, (20, 44))), "pad them to 24x48"),
    (of_tiny(lambda net: build_table(net, (24, 48), repeats=0)), "at least 1"),
    # pairs
    (lambda: RandomDots(10, 24, 48, 60), "do not fit"), (lambda: RandomDots(10, 24, 48, 9, "cubes"), "kind"),
    (lambda: RandomDots(0, 24, 48, 9), "empty"),
])  # fmt: skip
def test_it_is_refused(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()


@pytest.mark.parametrize("words, says", [
    ({"batch": 0}, "batch=0"), ({"checkpoint_every": 0}, "checkpoint_every=0"), ({"sampling": "each"}, "sampling"),
    ({"semantics": "leave"}, "semantics"), ({"loss_over": "all"}, "loss_over"),
    ({"divisor": "participants"}, "per-rank"), ({"method": "powersgd"}, "powersgd"),
    ({"method": "dense", "divisor": "participants", "sampling": "per-rank"}, "divisor"),
])  # fmt: skip
def test_options_of_training_that_are_refused_leave_nothing_attached(words, says):
    net = tiny()
    with pytest.raises(ValueError, match=says):
        shrink(net, DATA, phases(net), **words)
    for _ in range(2):
        with SupernetTrainer(net, phases(net)[0], adam(net, 1e-3)):
            pass


@pytest.mark.parametrize("name, content, read, says", [
    ("list.txt", b"a", read_list, "left right"), ("list.txt", b"a b c d", read_list, "4 names"),
    ("list.txt", b"x.png y.png", read_list, "there is no"), ("list.txt", b"# no", read_list, "lists no pairs"),
    ("two.txt", b"two.txt two.txt", StereoFiles, "without a disparity"),
    ("cut.pfm", b"Pf\n2 2\n1.0\n" + bytes(15), read_pfm, "cut short"),
    ("not.pfm", b"P6 no", read_pfm, "not a PFM"), ("d.txt", b"", read_disparity, "what kind"),
    ("bad.pt", b"no", load_net, r"bad\.pt"), ("missing.pt", None, load_net, r"missing\.pt"),
])  # fmt: skip
def test_files_that_are_refused(name, content, read, says, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / name)


def test_files_of_other_networks_are_refused(tmp_path):
    for content, says in (({"format": "else"}, "is not a network"), ({"format": tmp_path}, "holds a pathlib")):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=rf"other\.pt {says}"):
            load_net(tmp_path / "other.pt")


def test_exports_say_what_they_need(tmp_path, monkeypatch):
    net = shaken(ElasticStereo.tiny(0)).eval()
    plain = net.extract(net.space.smallest).eval()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # nothing of that name can be imported
    for name, says in (("net.onnx", r"pip install .*onnxruntime"), ("net.bin", r"\.pt2")):
        with pytest.raises(ValueError, match=says):
            export(plain, tmp_path / name, (24, 48))
