"""Costs, fusion plans, placements, the simulator: decisions as pure functions of numbers.

Two folders sit above the methods, whose programs they run on shapes alone: ``timeline`` and ``choose``. The rest lies
below them. What does not live here: tensors with data, ranks, anything that communicates (engine/, collectives/).
"""
