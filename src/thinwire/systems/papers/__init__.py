"""Eleven papers: what each claims, what of it holds here, and why. ``thinwire reproduce`` shows it.

A paper is a file of this package: its figures as published, ours simulated at its scale, ours measured in the small,
and the rule that turns these into a verdict. Nothing that the library decides depends on what stands here.
"""

from thinwire.systems.papers.paper import NAMES, Paper, Reproduced, Shown, paper, reproduce
from thinwire.systems.papers.workbench import Workbench

__all__ = ["NAMES", "Paper", "Reproduced", "Shown", "Workbench", "paper", "reproduce"]
