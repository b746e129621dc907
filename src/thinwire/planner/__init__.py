"""Costs, fusion plans, placements, the simulator: decisions as pure functions of numbers.

What does not live here: tensors, ranks, anything that communicates (engine/, collectives/).
"""
