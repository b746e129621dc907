"""Makes the helpers in tests/ importable and keeps torch to one thread."""

import signal
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "dist")]
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: what we start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
