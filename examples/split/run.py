"""Split fine-tuning between two emulated machines, by the verbs that two real ones would use.

python examples/split/run.py
python examples/split/run.py --link 100mbit --codecs none
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from thinwire import lab

THINWIRE = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "split"]
CLOUD = "10.77.0.1"  # node 0 of the lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--delay", default="0", help="one-way, such as 5ms")
    parser.add_argument("--model", default="bert:layers=2:hidden=128:heads=4")
    parser.add_argument("--cut", default="1")
    parser.add_argument("--rank", default="8")
    parser.add_argument("--codecs", default="int8,pack")
    parser.add_argument("--plain", action="store_true", help="cut at a layer's boundary: the whole width crosses")
    parser.add_argument("--lines", default="200")
    parser.add_argument("--epochs", default="2")
    options = parser.parse_args()
    if "RANK" in os.environ:
        machine(Path(os.environ["SPLIT_FOLDER"]))
        return
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        words = ["--model", options.model, "--cut", options.cut, "--rank", options.rank, "--lines", options.lines]
        words += ["--up", options.codecs, "--down", options.codecs, "--epochs", options.epochs, "--link", options.link]
        words += ["--delay", options.delay, "--out", str(folder)] + ["--kind", "boundary"] * options.plain
        subprocess.run([*THINWIRE, "plan", *words], check=True)
        keys = ["keys", "new", str(folder / "keys"), "--names", "cloud,edge", "--host", CLOUD]
        subprocess.run([*THINWIRE[:-1], *keys], check=True, stdout=subprocess.DEVNULL)
        try:
            result = lab.run(
                lab.Cluster.parse(2, 1, options.link, options.delay),
                [sys.executable, __file__],
                env={"SPLIT_FOLDER": where},
                on_line=lambda rank, line: print(f"[{('cloud', 'edge')[rank]}] {line}", flush=True),
            )
        except lab.LabError as error:
            raise SystemExit(f"error: {error}") from None
        if result.exit_code:
            raise SystemExit(result.exit_code)
        report = json.loads((folder / "report.json").read_text())
    steps, training = report["steps"], report["training"]
    crossed = sum(training["sent"].values()) + sum(training["received"].values())
    print(f"{steps} steps, {report['seconds'] / steps:.3f} s and {crossed / steps / 1e3:.1f} kB each")
    print(f"accuracy on held-out lines: {report['score']:.3f}")


def machine(folder: Path) -> None:
    """What each of the two machines runs: rank 0 is the cloud."""
    if os.environ["RANK"] == "0":
        words = ["cloud", str(folder / "cloud.safetensors"), "--listen", f"{os.environ['MASTER_ADDR']}:7443"]
        raise SystemExit(subprocess.run([*THINWIRE, *words, "--keys", str(folder / "keys" / "cloud")]).returncode)
    words = ["edge", str(folder / "edge.safetensors"), "--cloud", f"{os.environ['MASTER_ADDR']}:7443", "--json"]
    done = subprocess.run(
        [*THINWIRE, *words, "--keys", str(folder / "keys" / "edge")], stdout=subprocess.PIPE, text=True
    )
    (folder / "report.json").write_text(done.stdout)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
