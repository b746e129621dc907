"""Probe the network and profile the model.

What does not live here: decisions (planner/).
"""
