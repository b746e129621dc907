"""Published figures as data. A figure from memory says so in its source: check it before quoting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.core.pricing.costs import Provenance

MEMORY = "from memory of the paper: verify before quoting"
_OMGS = "code: HKBU-HPML/OMGS-SGD, plotting script; totals are sums"
_GTOPK = "code: hclhkbu/gtopkssgd, scripts/icdcs2019"
_DGC = "code: synxlin/deep-gradient-compression, README"
_ACP = "code: lzhangbv/acpsgd, batch.sh"
_KFAC = "code: shyhuai/kfac_pytorch, scripts; communication parts are exposed times"
_DEAR = "code: lzhangbv/dear_pytorch, benchmarks.py"


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        name: "paper/what", see ``figure``.
        setting: model, workers, network.
        unit: of the values.
        values: label -> number.
        source: paper, code or abstract.
        provenance: always "measured elsewhere".
    """

    name: str
    setting: str
    unit: str
    values: Mapping[str, float]
    source: str
    provenance: Provenance = "measured elsewhere"

    def __hash__(self) -> int:
        return hash(self.name)


def _omgs(name: str, model: str, numbers: tuple[float, ...]) -> Figure:
    labels = (
        "forward",
        "backward",
        "topk select",
        "topk communicate",
        "topk total",
        "omgs select",
        "omgs communicate",
        "omgs total",
    )
    values = dict(zip(labels, numbers, strict=True))
    return Figure(f"omgs/{name}", f"{model}, 16 GPUs, 1 GbE", "seconds per iteration", values, _OMGS)


def _gtopk(name: str, model: str, single: float, **throughputs: tuple[float, ...]) -> Figure:
    values = {"single": single}
    for method, numbers in throughputs.items():
        values |= {f"{method} {workers}": x for workers, x in zip((4, 8, 16, 32), numbers, strict=True)}
    return Figure(f"gtopk/{name}", f"{model}, 1 GbE, density .001", "samples/s per GPU", values, _GTOPK)


def _gtopk_parts(name: str, model: str, *seconds: float) -> Figure:
    values = dict(zip(("compute", "compress", "communicate"), seconds, strict=True))
    return Figure(f"gtopk/{name}-parts", f"gTop-k, {model}, 32 workers, 1 GbE", "seconds per iteration", values, _GTOPK)


def _dgc(name: str, model: str, *accuracies: float) -> Figure:
    labels = ("dense", "8", "16", "32", "64", "128", "256")
    values = dict(zip(labels, accuracies, strict=True))
    return Figure(f"dgc/{name}", f"{model}, ImageNet, density .001, by GPUs", "% top-1", values, _DGC)


_SPARSE = (
    _omgs("vgg16", "VGG-16 (CIFAR)", (0.021, 0.0313, 0.0767, 0.207, 0.3360, 0.0737, 0.205, 0.3310)),
    _omgs("resnet50", "ResNet-50", (0.09, 0.12, 0.1376, 0.3185, 0.6661, 0.1321, 0.165, 0.5071)),
    Figure("omgs/speedup", "over Top-k, 16 GPUs, 1 GbE", "times", {"vgg16": 1.015, "resnet50": 1.314}, _OMGS),
    Figure("omgs/smax", "ResNet-50; the script's t_c is the selection time", "times", {"smax": 1.52}, MEMORY),
    Figure(
        "lags/resnet50",
        "ResNet-50, 16 x P102-100, 1 GbE",
        "seconds per iteration",
        {"dense": 1.45, "topk": 0.67, "lags": 0.51},
        MEMORY,
    ),
    _gtopk(
        "vgg16",
        "VGG-16",
        1317.3,
        dense=(104.2, 92.56, 39.48, 12.6),
        topk=(110.6, 109.9, 97.9, 63.0),
        gtopk=(131.1, 130.6, 126.4, 123.2),
    ),
    _gtopk(
        "resnet20",
        "ResNet-20",
        920.6,
        dense=(821.7, 705.2, 520.4, 287.9),
        topk=(908.8, 753.0, 737.6, 696.0),
        gtopk=(916.3, 868.7, 808.5, 789.3),
    ),
    _gtopk(
        "resnet50",
        "ResNet-50",
        52.9,
        dense=(39.0, 37.0, 23.2, 10.7),
        topk=(37.7, 35.7, 34.5, 30.6),
        gtopk=(39.8, 39.7, 39.1, 39.1),
    ),
    _gtopk_parts("vgg16", "VGG-16", 0.1395, 0.0914, 0.8118),
    _gtopk_parts("resnet20", "ResNet-20", 0.1460, 0.0016, 0.0247),
    _gtopk_parts("resnet50", "ResNet-50, 16 local steps", 4.882, 0.154, 1.424),
    _dgc("resnet50", "ResNet-50", 76.2, 76.6, 76.5, 76.3, 76.8, 76.4, 75.9),
    _dgc("vgg16-bn", "VGG-16-BN", 73.4, 74.1, 73.8, 73.3, 74.2, 73.1, 71.7),
    Figure("dgc/cosine", "32 GPUs, cosine schedule", "% top-1", {"resnet50": 76.7, "vgg16-bn": 74.4}, _DGC),
    Figure(
        "hitopk/speedup",
        "128 V100, 25 Gb/s, over the state of the art",
        "% faster",
        {"least": 25, "most": 40},
        "abstract of 2010.10458",
    ),
    Figure(
        "hitopk/exact-topk",
        "V100, 2020; that it belongs to 2010.10458 is inference",
        "seconds",
        {"exact top-k": 0.239, "dense communication": 0.2418},
        "code: lzhangbv/kfac_pytorch, time break-down",
    ),
    Figure(
        "mstopk/2080ti",
        "RTX 2080 Ti, uniform inputs",
        "ms",
        {"per million elements": 0.34, "floor per call": 0.6},
        "code: Xinrui-Yang/BatchedMSTopK",
    ),
    Figure("oktopk/speedup", "BERT, 256 P100", "times", {"least": 3.29, "most": 12.95}, "abstract"),
    Figure("dgc/ratio", "gradient compression", "times", {"least": 270, "most": 600}, "abstract"),
    Figure("spardl/speedup", "over earlier sparse all-reduces", "times", {"most": 4.9}, "abstract"),
    Figure(
        "counter/datacentre",
        "set-ups in which compression beat tuned dense training",
        "set-ups",
        {"won": 6, "of more than": 200},
        "MLSys 2022",
    ),
)
_DENSE = (
    Figure(
        "dear/speedup",
        "64 GPUs, five models, over the best of its baselines",
        "times, at most",
        {"10 GbE": 1.83, "100 Gb/s InfiniBand": 1.15},
        "abstract of 2302.12445",
    ),
    Figure(
        "dear/batch",
        "64 GPUs, 16 x 4, BERT at length 64",
        "samples per GPU",
        {"resnet50": 64, "densenet201": 32, "inception-v4": 64, "bert-base": 64, "bert-large": 32},
        _DEAR,
    ),
    Figure(
        "us-byte/speedup",
        "8 nodes, at most",
        "times",
        {"over bytescheduler": 1.26, "over wfbp": 1.56},
        "abstract",
    ),
    Figure(
        "acp/speedup",
        "32 GPUs, mean over the models",
        "times",
        {"over s-sgd": 4.06, "over power-sgd": 1.43},
        "abstract of 2306.08881",
    ),
    Figure(
        "acp/resnet50",
        "ResNet-50, 10 GbE, 32 GPUs",
        "ms per iteration",
        {"ssgd": 266, "acp": 248, "powersgd": 302},
        MEMORY,
    ),
    Figure(
        "acp/bert-base",
        "BERT-Base, 10 GbE, 32 GPUs",
        "ms per iteration",
        {"ssgd": 805, "acp": 193, "powersgd": 292},
        MEMORY,
    ),
    Figure(
        "acp/batch",
        "4 GPUs per node, BERT at length 64",
        "samples per GPU",
        {"resnet50": 64, "resnet152": 32, "bert-base": 32, "bert-large": 8},
        _ACP,
    ),
    Figure(
        "acp/rank",
        "as in its script",
        "rank",
        {"resnet50": 4, "resnet152": 4, "bert-base": 32, "bert-large": 32},
        _ACP,
    ),
    Figure(
        "powersgd/ratio",
        "Power-SGD, rank 4 and rank 32",
        "times fewer elements",
        {"resnet50": 67, "bert-base least": 16, "bert-base most": 17},
        MEMORY,
    ),
    Figure(
        "powersgd/resnet18",
        "ResNet-18, CIFAR-10, 16 workers",
        "ms per batch",
        {"sgd": 312, "rank 1": 229, "rank 2": 239, "rank 4": 260},
        MEMORY,
    ),
    Figure(
        "powersgd/resnet18-accuracy",
        "ResNet-18, CIFAR-10, 16 workers",
        "%",
        {"sgd": 94.3, "rank 1": 93.6, "rank 2": 94.4, "rank 4": 94.5},
        MEMORY,
    ),
    Figure(
        "powersgd/resnet18-volume",
        "ResNet-18, CIFAR-10, 16 workers",
        "MB per epoch",
        {"sgd": 1023, "rank 1": 4, "rank 2": 8, "rank 4": 14},
        MEMORY,
    ),
    Figure("qsgd/resnet152", "ResNet-152, 16 GPUs, full accuracy", "times", {"speed-up": 1.8}, "abstract"),
)


def _kfac(name: str, model: str, *rows: tuple[float, ...]) -> Figure:
    parts = ("passes", "gradients", "statistics", "factors", "invert", "send", "total")
    values = {
        f"{a} {p}": x
        for a, row in zip(("dkfac", "mpd", "spd"), rows, strict=True)
        for p, x in zip(parts, row, strict=True)
    }
    return Figure(f"kfac/{name}", f"{model}, 64 RTX 2080 Ti, 100 Gb/s", "seconds per iteration", values, _KFAC)


_SECOND_ORDER = (
    _kfac(
        "resnet50",
        "ResNet-50, batch 32",
        (0.132, 0.0648, 0.2115, 0.1700, 0.2742, 0.0, 0.8525),
        (0.132, 0.0648, 0.2115, 0.1700, 0.0512, 0.1340, 0.7635),
        (0.132, 0.0648, 0.2115, 0.0981, 0.1050, 0.0641, 0.6755),
    ),
    _kfac(
        "resnet152",
        "ResNet-152, batch 8",
        (0.114, 0.1590, 0.1927, 0.4391, 0.6759, 0.0, 1.5807),
        (0.114, 0.1590, 0.1927, 0.4359, 0.0539, 0.4378, 1.3933),
        (0.114, 0.1590, 0.1927, 0.2760, 0.2814, 0.1458, 1.1689),
    ),
    Figure(
        "kfac/ablation-resnet50",
        "ResNet-50, 64 RTX 2080 Ti",
        "seconds per iteration",
        {"neither": 0.8525, "pipelining": 0.7806, "placement": 0.7474, "both": 0.6755},
        _KFAC,
    ),
    Figure(
        "kfac/ablation-resnet152",
        "ResNet-152, 64 RTX 2080 Ti",
        "seconds per iteration",
        {"neither": 1.5807, "pipelining": 1.4176, "placement": 1.3319, "both": 1.1689},
        _KFAC,
    ),
    Figure(
        "kfac/speedup", "SPD-KFAC over the state of the art", "%", {"least": 10, "most": 35}, "abstract of 2107.06533"
    ),
    Figure("kaisa/speedup", "to convergence", "%", {"least": 18.1, "most": 36.3}, "abstract of 2107.01739"),
)
FIGURES = _SPARSE + _DENSE + _SECOND_ORDER
"""All rows, by paper."""


def figure(name: str) -> Figure:
    """The row of that name.

    Raises:
        ValueError: there is none.
    """
    for row in FIGURES:
        if row.name == name:
            return row
    raise ValueError(f"figure {name!r} is unknown; there are {', '.join(row.name for row in FIGURES)}")
