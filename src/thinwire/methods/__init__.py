"""One file per method, and the registry of their names. A method is a program plus its options, nothing more.

Not here: tensor maths (kernels/), communication (collectives/, engine/), decisions (planner/).
"""
