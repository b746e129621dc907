"""Costs, fusion plans, placements and the simulator: decisions as pure functions of numbers.

The packages ``timeline`` and ``choose`` import the methods, whose programs they run on shapes alone; the other modules
are below the methods. Tensors with data, ranks and communication do not belong here (see engine/, collectives/).
"""
