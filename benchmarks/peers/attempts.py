"""Try to install the peers that are not in the lock file, and keep what pip says: ``python attempts.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import store
from catalogue import TRIED

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
SECONDS = 170
PATHS = re.compile(r"(file://)?/[^\s'\"]*/")


def attempt(name: str, use: str) -> str:
    """Install into a folder and run ``use``; "" if that works, else the line that says why not."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            [*pip, "install", "--target", folder, "-c", str(CONSTRAINTS), name],
            [sys.executable, "-c", use],
        ):
            environment = {**os.environ, "PYTHONPATH": folder}
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
                )
            except subprocess.TimeoutExpired:
                return f"not built after {SECONDS} s"
            if done.returncode:
                return _why(done.stdout + done.stderr)
    return ""


def _why(output: str) -> str:
    """The line that says most: an exception, else a conflict, else pip's last error; without paths of this machine."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    kinds = (
        [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotFound)\b.*: ", line)],
        [line for line in lines if line.startswith("error: ") and "exited" not in line],
        [line for line in lines if " depends on torch" in line],
        [line for line in lines if line.startswith("ERROR:")],
        lines or ["pip failed without a word"],
    )
    found = next(kind for kind in kinds if kind)[-1]
    return PATHS.sub("", found.removeprefix("ERROR: ").removeprefix("error: "))


def main() -> None:
    for name, (_, use) in TRIED.items():
        if name not in store.read()["tried"]:
            said = attempt(name, use)
            print(f"{name}: {said or 'installs'}", flush=True)
            results = store.read()
            results["tried"][name] = said
            store.write(results)


if __name__ == "__main__":
    main()
