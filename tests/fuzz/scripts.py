"""Scripts as data: a seed makes one, and ``smaller`` gives what a shrinker may try in its place."""

import copy
import functools
import itertools
import json
import random

BUFFERS = [
    *(f"{d} {how}" for d in ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "uint8", "bool", "int32",
                             "int64") for how in ("in place", "rebind", "constant")),
    "float32 mask", "bfloat16 mask", "float32 expanded", "int64 expanded", "int64 big", "bool flag", "uint8 flag",
]  # fmt: skip
METHODS = [
    ("ssgd", {}), ("ssgd", {}), ("ssgd", {"deterministic": True}), ("cast", {"dtype": "bf16"}),
    ("cast", {"dtype": "fp16"}), ("cast", {"dtype": "int8", "block": 16}), ("cast", {"dtype": "int4", "block": 8}),
    ("cast", {"dtype": "int2", "block": 16}), ("signsgd", {}), ("onebit", {}), ("qsgd", {}),
    ("qsgd", {"bits": 2, "norm": "l2"}), ("terngrad", {}), ("topk", {"density": 0.1}),
    ("topk", {"density": 0.3, "value_dtype": "bf16"}), ("gtopk", {"density": 0.1}), ("oktopk", {"density": 0.1}),
    ("dgc", {"density": 0.1}), ("powersgd", {"rank": 2, "min_rate": 1.0}), ("acp", {"rank": 2, "min_rate": 1.0}),
    ("hitopk", {"density": 0.1}), ("lags", {"max_ratio": 10}), ("dear", {}), ("dear", {}),
    ("dear", {"update_in_step": True}),
    ("cast", {"dtype": "bf16", "decoupled": True}), ("acp", {"rank": 2, "min_rate": 1.0, "decoupled": True}),
]  # fmt: skip
OPTIMIZERS = [
    ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "foreach": False}), ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}), ("Adam", {"lr": 0.01, "foreach": False}), ("RMSprop", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05}), ("NAdam", {"lr": 0.01}), ("Adadelta", {"lr": 0.5}),
    ("AdamW", {"lr": 0.01, "fused": True}),
]  # fmt: skip


def make(seed):
    """The script of a seed, as plain data."""
    family = random.Random(f"family {seed}")
    if (chance := family.random()) < 0.18:
        return (_sites if chance < 0.06 else _joint if chance < 0.12 else _paces)(seed, family)
    draw = random.Random(seed)
    local = draw.random() < 0.25
    case = {"seed": seed, "model": _model(draw)}
    case["method"], case["options"] = _local(draw) if local else copy.deepcopy(draw.choice(METHODS))
    case["attach"] = _attach(draw, case, local)
    decoupled = case["method"] == "dear" or case["options"].get("decoupled", False)
    plain = all("dtype" not in b and b["kind"] != "image" for b in case["model"]["blocks"])
    narrow = any("grad_dtype" in b or b.get("dtype") == "float16" for b in case["model"]["blocks"])
    kinds = [o for o in OPTIMIZERS if (plain or "fused" not in o[1]) and (o[0] == "SGD" or not narrow)]
    kinds = OPTIMIZERS[:1] if case["method"] == "dgc" else kinds  # which has its own momentum
    parts = ["even", "odd"] if draw.random() < 0.2 else ["all"]
    case["optimizers"] = [
        {"kind": kind, "options": copy.deepcopy(options), "part": part}
        for part in parts for kind, options in [draw.choice(kinds)]
    ]  # fmt: skip
    if len(parts) == 1 and not decoupled and case["method"] != "dgc" and draw.random() < 0.1:
        case["two-step"] = True
    if not local and not decoupled and draw.random() < 0.08:
        case["no optimizer"] = True
    floats = {b.get("dtype", "float32") for b in case["model"]["blocks"]} | {case["model"].get("dtype", "float32")}
    scales = floats == {"float32"} and case["options"].get("dtype") != "fp16" and "no optimizer" not in case
    if scales and draw.random() < 0.25:
        case["scaler"] = {"init_scale": draw.choice([4.0, 1024.0]), "growth_interval": draw.choice([2, 1000])}
        if not local and draw.random() < 0.5:
            case["attach"]["scaler"] = True
    if not local and draw.random() < 0.5:
        case["plan"] = draw.randrange(1000)
    chance = any(b["kind"] in ("dropout", "rarely", "odd", "image") or "dtype" in b for b in case["model"]["blocks"])
    closure = case["method"] == "ssgd" and floats <= {"float32", "float64"} and "scaler" not in case
    modes = {
        "closure": closure and not chance and "no optimizer" not in case,
        "autocast": floats == {"float32"} and draw.random() < 0.4,
        "local": local,
        "decoupled": decoupled,
    }
    case["events"] = _events(draw, case, modes)
    if decoupled and any(one["kind"] != "SGD" for one in case["optimizers"]):
        for event in case["events"]:
            event.pop("clip", None)  # which is as exact as its norm, and others divide noise by its own size
    _around(random.Random(f"around {seed}"), case, modes)
    _spare(case, local)
    return case


def _sites(seed, draw):
    """Local steps of two sites whose models are sharded."""
    plain = [{"kind": "linear", "bias": True}, {"kind": "frozen"}, {"kind": "norm"}, {"kind": "layernorm"},
             *({"kind": "rarely", "when": when} for when in ("none", "rank 1", "odd"))]  # fmt: skip
    case = {"seed": seed, "family": "sites", "model": {"blocks": draw.choices(plain, k=draw.choice([1, 2, 3]))}}
    case["method"], case["options"] = _local(draw)
    case["attach"] = {"broadcast_buffers": False} if draw.random() < 0.2 else {}
    case["optimizers"] = [dict(zip(("kind", "options"), draw.choice(SHARDED)), part="all")]
    case |= {"unkept": True} if draw.random() < 0.2 else {}
    turn = {"do": "turn", "end": "step", "last": "backward", "zero": "none"}
    some = [
        *({"do": kind} for kind in ("target", "restart", "reload", "finish", "outer", "write")),
        {"do": "evaluation", "mode": "no_grad", "who": [0, 1]},
    ]
    events = [draw.choice([turn | {"micro": draw.choice([0, 0, 1])}] * 7 + some) for _ in range(draw.choice([3, 6, 9]))]
    case["events"] = [*({"do": "reload"} for _ in range(draw.random() < 0.2)), turn, *events, turn]
    return case


def _joint(seed, draw):
    """Two ranks, and one with both batches."""
    blocks = draw.choices(
        [{"kind": "linear", "bias": True}, {"kind": "linear", "bias": False}], k=draw.choice([1, 2, 3])
    )
    case = {"seed": seed, "family": "joint", "model": {"blocks": blocks, "dtype": "float64"}, "kfac": None}
    case["method"], case["options"] = draw.choice([("ssgd", {}), ("ssgd", {"fusion": "none"}), ("dear", {})])
    whole = [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.01})]
    layered = [("LARS", {"lr": 0.1, "skip_lr_scale": 0.01}), ("LAMB", {"lr": 0.01, "max_grad_norm": None})]
    case["optimizer"] = dict(zip(("kind", "options"), draw.choice(whole + layered)))
    if case["method"] != "dear" and draw.random() < 0.6:
        steps = draw.choice([(1, 1), (1, 2), (2, 4)])
        case["kfac"] = {"damping": 0.1, "kl_clip": draw.choice([None, 0.001]), "factor_update_steps": steps[0],
                        "inv_update_steps": steps[1], "method": draw.choice(["inverse", "eigen"])}  # fmt: skip
    ends = ["backward"] * 4 + ["synchronize"] * (case["kfac"] is None and case["method"] == "ssgd")
    case["events"] = [
        {"do": "turn", "micro": draw.choice([0, 0, 1, 2]), "zero": draw.choice(["none", "zeros"]),
         "last": draw.choice(ends), "clip": draw.choice([None, None, 0.1])}
        for _ in range(draw.choice([3, 5, 8]))
    ]  # fmt: skip
    for event in case["events"]:
        if case["method"] == "ssgd" and case["kfac"] is None and event["last"] == "backward" and draw.random() < 0.3:
            event["left"] = draw.choice([[1, 2], [3, 1], [0, 2]])
    return case


def _paces(seed, draw):
    """Local steps of two ranks whose speeds differ, and change."""
    case = {"seed": seed, "family": "paces", "method": "local", "model": {"blocks": [], "dtype": "float64"}}
    case["model"]["blocks"] = draw.choices(
        [{"kind": "linear", "bias": True}, {"kind": "layernorm"}], k=draw.choice([1, 2])
    )
    every = draw.choice([2, 3, 4, 6, 8])
    case["options"] = {"sync_every": every, "codec": draw.choice(["none", "int8", "int4", "int2"])}
    if draw.random() < 0.4:
        case["options"]["fragment_sync_delay"] = draw.randrange(1, every)
        case["options"] |= {"fragments": 2} if draw.random() < 0.5 else {}
    if draw.random() < 0.3:
        case["options"]["look"] = 0.3
    case["total"] = draw.randrange(1, 8 * every)
    speeds = [1.0, 1.05, 1.5, 2.0, 4.0, 9.0]
    case["events"] = [{"do": "speed", "at": 0, "seconds": [draw.choice(speeds), draw.choice(speeds)]}]
    for at in sorted(draw.randrange(case["total"]) for _ in range(draw.choice([0, 1, 2, 3]))):
        again = {"do": "again", "at": at}
        case["events"].append(
            draw.choice([again, case["events"][0] | {"at": at, "seconds": draw.choices(speeds, k=2)}])
        )
    return case


SHARDED = [("SGD", {"lr": 0.05, "momentum": 0.9}), ("SGD", {"lr": 0.1}), ("AdamW", {"lr": 0.01})]


def _around(draw, case, modes):
    """What is around a training: who keeps the handle, other people's hooks, private parameters, what comes after."""
    local, decoupled, plain = modes["local"], modes["decoupled"], "no optimizer" not in case
    events, attach = case["events"], case["attach"]
    if draw.random() < 0.1:
        case["unkept"] = True
    if draw.random() < 0.15 and plain and not decoupled and "two-step" not in case:
        case["foreign"] = draw.choice(["decay", "replace"])
    if local and draw.random() < 0.2 and "ignore" not in attach and attach.get("broadcast_buffers", True):
        case["averaged"] = True
    quiet = "scaler" not in case and not modes["closure"] and not any(e.get("end") == "sam" for e in events)
    more = any(b["kind"] in ("linear", "noted") for b in case["model"]["blocks"])
    more = more and "fragments" not in case["options"]
    if draw.random() < 0.15 and plain and more and not decoupled and quiet and "two-step" not in case:
        case["private"] = True
        attach.pop("ignore", None)
        case.pop("plan", None)
    options, inside = case["options"], any(e["do"] in ("freeze", "thaw") for e in events)
    targets = any(b["kind"] == "frozen" for b in case["model"]["blocks"])
    if local and draw.random() < (0.5 if targets else 0.05) and not inside:
        turn = _turn(draw, case, modes) | {"end": "step", "last": "backward"}
        turn.pop("inf", None)
        times = 9 * case["options"]["sync_every"]
        moves = draw.choice([[], [3], [times - 4, times - 3], [*range(times)]])
        events.insert(-1, {"do": "turns", "times": times, "turn": turn, "targets": moves})
    early = {"fragment_sync_delay", "fragments", "warmup_steps", "detect_desync"} & (options.keys() | attach.keys())
    waits = local and not early
    if waits and draw.random() < 0.15 and "scaler" not in case and options["sync_every"] > 1:
        events.append({"do": "uneven", "who": draw.choice([0, 1])})
    if local and draw.random() < 0.1 and "scaler" not in case:
        events.append({"do": "parts"})
    equal = "private" not in case and "ignore" not in attach and attach.get("broadcast_buffers", True)
    if plain and draw.random() < 0.15 and equal:
        events.append({"do": "elsewhere"})


def _spare(case, local):
    """Take out what torch itself does not do, or what has no twin."""
    if any(event["do"] == "freeze" for event in case["events"]):  # an old .grad of a frozen parameter still moves it
        for event in case["events"]:
            event |= {"zero": "none"} if event.get("zero") == "keep" else {}
    again = {"restart", "reload", *(["reattach", "raises"] if local else [])}
    if any(event["do"] in {*again, "elsewhere"} for event in case["events"]):
        spared = "expanded", "bool in place", "bool rebind"  # cannot be loaded; may look as it did before it was loaded
        for block in case["model"]["blocks"]:
            if "kinds" in block:
                block["kinds"] = [f"{k.split()[0]} constant" if k.endswith(spared) else k for k in block["kinds"]]
        if local:  # frozen afterwards, a parameter would be in no round
            case["events"] = [event for event in case["events"] if event["do"] not in ("freeze", "thaw")]


def _model(draw):
    blocks = []
    for _ in range(draw.choice([0, 1, 1, 2, 3, 4])):
        kind = draw.choice(
            ["linear", "linear", "linear", "frozen", "tied", "noted", "odd", "image", "words", "rarely", "buffers",
             "buffers", "norm", "layernorm", "dropout"]
        )  # fmt: skip
        block = {"kind": kind}
        if kind == "odd":
            block["shapes"] = draw.sample(["scalar", "empty", "row", "column", "cube", "long"], draw.choice([1, 2, 3]))
        elif kind == "rarely":
            block["when"] = draw.choice(["none", "rank 1", "odd"])
        elif kind == "buffers":
            block["kinds"] = draw.choices(BUFFERS, k=draw.choice([1, 2, 3, 4]))
        elif kind == "linear":
            block["bias"] = draw.random() < 0.7
            if draw.random() < 0.2:
                block["times"] = 2
            elif draw.random() < 0.2:
                block["again"] = True
            if draw.random() < 0.25:
                block["dtype"] = draw.choice(["bfloat16", "float16", "float64"])
                if block["dtype"] == "bfloat16" and draw.random() < 0.3:
                    block["grad_dtype"] = "float32"
        blocks.append(block)
    model = {"blocks": blocks}
    if not any("dtype" in b for b in blocks) and draw.random() < 0.15:
        model["dtype"] = draw.choice(["float64", "bfloat16"])
    return model


def _local(draw):
    options = {"sync_every": draw.choice([1, 2, 3, 4])}
    options["codec"] = draw.choice(["none", "none", "int8", "int4", "fp16", "topk", "powersgd", "acp", "signsgd"])
    if options["sync_every"] > 1 and draw.random() < 0.4:
        options["fragment_sync_delay"] = draw.randrange(options["sync_every"])
    if draw.random() < 0.3:
        options["fragments"] = 2
    if draw.random() < 0.2:
        options["warmup_steps"] = 2
    if draw.random() < 0.2:
        options["fragment_update_alpha"] = draw.choice([0.0, 0.5])
    return draw.choice(["local", "local", "diloco"]), options


def _attach(draw, case, local):
    options = {}
    if draw.random() < 0.2:
        options["broadcast_buffers"] = False
    if draw.random() < 0.3:
        options["keep_dense"] = draw.choice(["none", "short", "all"])
    if draw.random() < 0.4:
        options["start_compression_step"] = draw.choice([0, 0, 1, 3])
    if draw.random() < 0.2:
        options["detect_desync"] = True
    if draw.random() < 0.2:
        options["apart"] = True
    if draw.random() < 0.1:
        options["ignore"] = True
    if not local:
        if draw.random() < 0.25:
            options["find_unused_parameters"] = True
        if draw.random() < 0.25:
            options["gradient_as_bucket_view"] = False
        if draw.random() < 0.15 and case["method"] != "lags":
            options["bucket_cap_mb"] = 0.001
    return options


def _turn(draw, case, modes):
    residual = case["method"] not in ("ssgd", "dear")
    turn = {
        "do": "turn",
        "micro": draw.choice([0, 0, 0, 1, 2]),
        "zero": draw.choice(["none", "none", "zeros", "model"]),
    }
    if draw.random() < 0.1:
        turn["zero"] = "by hand"
    elif draw.random() < 0.05 and not residual and not modes["decoupled"]:
        turn["zero"] = "keep"
    chance = draw.random()
    if not modes["local"]:
        turn["last"] = "synchronize" if chance < 0.2 else "by hand" if chance < 0.28 else "backward"
        if turn["last"] == "by hand" and modes["decoupled"]:
            turn["last"] = "backward"
    elif chance < 0.1:
        turn["last"] = "by hand"
    chance, plain = draw.random(), "no optimizer" not in case
    turn["end"] = "step"
    if chance < 0.15 and plain:
        turn["end"] = "drop"
        turn["zero"] = "none" if turn["zero"] == "keep" else turn["zero"]
    elif chance < 0.22 and plain and not modes["decoupled"] and "scaler" not in case:
        turn["end"], turn["zero"] = "sam", draw.choice(["none", "zeros"])
    if plain and draw.random() < 0.2:
        turn["clip"], turn["norm"] = draw.choice([0.01, 0.5, 10.0]), draw.choice([2.0, 2.0, float("inf")])
        low_rank = case["options"].get("decoupled") and case["method"] == "acp"
        if low_rank or (modes["local"] and any("empty" in b.get("shapes", ()) for b in case["model"]["blocks"])):
            turn["norm"] = 2.0  # as torch has it, there
    if draw.random() < 0.07 and (("scaler" in case and turn["end"] == "step") or turn["end"] == "drop"):
        turn["inf"] = draw.choice([0, 1])
    if modes["autocast"]:
        turn["autocast"] = draw.choice(["forward", "all", "all"])
    if draw.random() < 0.1:
        turn["rate"] = [draw.choice([0.01, 0.003]), draw.choice(["numpy", "float"])]
    if draw.random() < (0.5 if modes["decoupled"] else 0.1):
        turn["look"] = False
    return turn


def _events(draw, case, modes):
    first = _turn(draw, case, modes) | {"end": "step"}
    first.pop("inf", None)
    events = [first]
    if draw.random() < 0.08:
        what = draw.choice(["ddp", "buffer", "frozen"])
        events.insert(0, {"do": "refuse", "what": what, "kinds": draw.choice(["bf16", "wide"])})
    several = draw.choice([2, 3, 4, 5, 6])
    for _ in range(several):
        chance = draw.random()
        if chance < 0.55:
            events.append(_turn(draw, case, modes))
            continue
        freezes = [] if "fragments" in case["options"] else ["freeze", "thaw"]
        own = ["finish", "finish", "outer"] if modes["local"] else ["closure"] * 2 if modes["closure"] else []
        kind = draw.choice(
            ["evaluation", "evaluation", "write", "copy", "raises", "reattach", "restart", "target", "reload",
             "unsaveable", *freezes, *own]
        )  # fmt: skip
        event = {"do": kind}
        if kind == "evaluation":
            event |= {"mode": draw.choice(["no_grad", "inference", "grad"]), "who": draw.choice([[0], [1], [0, 1]])}
            event["batch statistics"] = draw.random() < 0.4
        elif kind in ("freeze", "thaw"):
            event["which"] = draw.randrange(8)
        elif kind == "write":
            event["how"] = draw.choice(["data", "swap", "in place"])
        elif kind == "copy":
            event |= {"how": draw.choice(["deepcopy", "save", "script"]), "who": draw.choice([[0], [0, 1]])}
        elif kind == "raises":
            event["where"] = draw.choice(["forward", "backward", "backward"])
        elif kind == "reattach":
            event["state"] = draw.random() < 0.7
        elif kind == "restart":
            if draw.random() < 0.5:
                event["rate"] = [0.01, draw.choice(["numpy", "float"])]
            if draw.random() < 0.3 and not modes["local"]:
                event["freeze"] = draw.randrange(8)
        elif kind == "finish":
            event["inference"] = draw.random() < 0.4
        events.append(event)
    last = _turn(draw, case, modes) | {"end": "step"}
    last.pop("inf", None)
    events.append(last)
    return events


def text(case):
    """A script as one line per event, to read and to run again: ``run.py --script FILE``."""
    head = {key: value for key, value in case.items() if key not in ("model", "events")}
    lines = ["{", *(f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items())]
    lines += [
        '  "model": {'
        + "".join(f"{json.dumps(k)}: {json.dumps(v)}, " for k, v in case["model"].items() if k != "blocks")
    ]
    lines[-1] += '"blocks": ['
    lines += [f"    {json.dumps(block)}," for block in case["model"]["blocks"]]
    lines[-1] = lines[-1].rstrip(",")
    lines += ["  ]},", '  "events": [']
    lines += [f"    {json.dumps(event)}," for event in case["events"]]
    lines[-1] = lines[-1].rstrip(",")
    return "\n".join([*lines, "  ]", "}"])


PLAIN = {"end": "step", "zero": "none", "last": "backward", "micro": 0, "kind": "linear", "dtype": None}
NEEDED = {
    "seed", "model", "method", "options", "attach", "optimizers", "events", "blocks", "part", "lr", "density", "rank",
    "min_rate", "sync_every", "codec", "do", "mode", "who", "which", "how", "where", "state", "what", "kinds",
    "inference", "at", "seconds", "total", "shapes", "when", "init_scale", "growth_interval", "times", "turn",
    "targets",
}  # fmt: skip


def smaller(case):
    """Yield scripts with one thing less, larger pieces first."""

    def spots(x, path=()):
        """Where something could be left out, or be plainer."""
        items = list(enumerate(x)) if isinstance(x, list) else list(x.items()) if isinstance(x, dict) else []
        for key, value in reversed(items) if isinstance(x, list) else items:
            if key in PLAIN and value != PLAIN[key] and (value != "buffers" or key != "kind"):
                yield (*path, key), PLAIN[key]
            elif key not in NEEDED and key not in PLAIN:
                yield (*path, key), None
        for key, value in items:
            yield from spots(value, (*path, key))

    def without(path, plain):
        other = copy.deepcopy(case)
        place = functools.reduce(lambda x, key: x[key], path[:-1], other)
        if plain is None:
            del place[path[-1]]
        else:
            place[path[-1]] = plain
        if "scaler" not in other:
            other.get("attach", {}).pop("scaler", None)
        return other

    events = case["events"]
    if len(events) > 3:
        half = len(events) // 2
        yield case | {"events": events[half:]}
        yield case | {"events": events[:half]}
    order = {"events": 0, "model": 1}
    yield from itertools.starmap(
        without, sorted(spots(case), key=lambda spot: (len(spot[0]) > 3, order.get(spot[0][0], 2)))
    )
    if case.get("family") in ("joint", "paces"):
        return
    if case["optimizers"] != [plain := {"kind": "SGD", "options": {"lr": 0.1}, "part": "all"}]:
        yield case | {"optimizers": [plain]}
    if case["method"] not in ("ssgd", "local", "diloco"):
        yield case | {"method": "ssgd", "options": {}}
