"""One file per method, and the registry of their names. A method is a program plus its options, nothing more.

Not here: tensor maths (core/kernels/), communication (core/collectives/, engine/), decisions (core/pricing/).
"""
