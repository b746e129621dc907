"""Eleven papers: what each claims, what of it holds here, and why. ``thinwire reproduce`` shows it.

A paper is a file of this package: its figures as published, ours simulated at its scale, ours measured in the small,
and the rule that turns these into a verdict. Nothing that the library decides depends on what stands here.
"""

NAMES = ("omgs", "lags", "inhad", "acp", "dear", "parrot", "sft", "easnet", "spdkfac", "hitopk", "imagenet")
"""Of the papers, and of their files."""
