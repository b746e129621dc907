"""Makes the helpers in tests/ importable and keeps torch to one thread."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "dist")]
torch.set_num_threads(1)
