"""Train an elastic stereo network on made-up scenes, cut it to a latency, look at a real pair. See README.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from baseline import box_match, draw_disparities, middlebury_motorcycle
from rich.console import Console
from rich.table import Table
from thinwire.supernet import SubNet
from thinwire.supernet.stereo import LatencyTable, calibrate, load_net, measure, pad
from thinwire.supernet.stereo.data import RandomDots, batches, normalise, random_dot_pair

from thinwire.engine.executors.alone import run_alone

SIZE, MOST = (72, 144), 24  # of training pairs; the largest disparity in them
SHRUNK = 3  # the motorcycle, 500 x 741, is made so many times smaller


def thinwire(*words: str, ranks: int = 1) -> str:
    """Run a verb of the command line, over several ranks of this machine if asked; what it prints on stdout."""
    verb = str(Path(sys.executable).with_name("thinwire"))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    command = [*(start if ranks > 1 else []), verb, *words]
    print("$ thinwire " + " ".join(words), flush=True)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # the verb has said why
        sys.exit(done.returncode)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("thinwire-out/stereo"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", default="500,500", help="of the large and of the shrinking phase")
    parser.add_argument("--batch", type=int, default=2, help="pairs per rank and step")
    options = parser.parse_args()
    began, out = time.monotonic(), options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    pairs = ["--data", "scenes", "--size", f"{SIZE[0]}x{SIZE[1]}", "--max-disparity", str(MOST)]
    train = ["supernet", "train", "--out", str(out), "--steps", options.steps]
    train += ["--batch-size", str(options.batch), *pairs]
    trained = json.loads(thinwire(*train, "--json", ranks=options.ranks).splitlines()[-1])

    # half-way between the smallest and the largest network of this machine
    net = load_net(out / "net.pt")
    size, table_file = f"{SIZE[0]}x{SIZE[1]}", str(out / "table.json")
    thinwire("supernet", "table", str(out / "net.pt"), "--size", size, "--out", table_file)
    timings = LatencyTable.from_json(Path(table_file).read_text())
    limit = f"{(timings.predict(net.space.smallest) + timings.predict(net.space.largest)) / 2:.1f}"
    search = ["supernet", "search", str(out / "net.pt"), "--limit-ms", limit, "--table", table_file]
    search += ["--population", "16", "--generations", "4"]
    found = json.loads(thinwire(*search, *pairs, "--json"))
    best = SubNet.from_json(json.dumps(found["sub_net"]))

    # a real pair: statistics of made-up scenes, as in training
    left, right, truth = middlebury_motorcycle(SHRUNK)
    views = [pad(normalise(x), net.multiple)[None] for x in (left, right)]
    maps = {"block matching, 9 x 9": box_match(left, right, MOST + 1)}
    calibration = list(batches(RandomDots(80, *SIZE, MOST, "scene", seed=7), 20))
    for name, sub_net in (("largest", net.space.largest), ("found", best), ("smallest", net.space.smallest)):
        run_alone(calibrate(net, sub_net, calibration))
        with torch.no_grad():
            maps[name] = net.extract(sub_net).eval()(*views)[-1][0, -left.shape[1] :, : left.shape[2]]
    draw_disparities(out / "motorcycle.png", left, truth, maps, bound=3.0)
    left_dots, right_dots, truth_dots = random_dot_pair(1, *SIZE, MOST, torch.Generator().manual_seed(5), "scene")
    with torch.no_grad():
        dots = net.extract(net.space.smallest).eval()(normalise(left_dots), normalise(right_dots))[-1][0]
    seen = {"block matching, 9 x 9": box_match(left_dots[0], right_dots[0], MOST + 1), "smallest": dots}
    draw_disparities(out / "scene.png", left_dots[0], truth_dots[0], seen, bound=3.0)

    table = Table(title=f"motorcycle, {left.shape[1]} x {left.shape[2]}")
    for column in ("estimate", "end-point error", "> 3 px"):
        table.add_column(column, justify="left" if column == "estimate" else "right")
    scores = {name: measure(x[None], truth[None], net.max_disparity) for name, x in maps.items()}
    for name, score in scores.items():
        table.add_row(name, f"{score.epe:.2f} px", f"{score.bad3:.1%}")
    Console().print(table)
    for name, corner in trained["corners"].items():
        print(f"made-up scenes, {name}: {corner['epe']:.2f} px; constant guess {trained['constant_guess_epe']:.2f} px")
    print(f"found under {limit} ms: {best}; measured {found['measured_ms']:.1f} ms, {found['parameters']:,} parameters")
    seconds = time.monotonic() - began
    result = {"seconds": seconds, "motorcycle": {n: {"epe": s.epe, "bad3": s.bad3} for n, s in scores.items()},
              "train": trained, "search": found}  # fmt: skip
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{seconds:.0f} s; pictures and result.json in {out}")


if __name__ == "__main__":
    main()
