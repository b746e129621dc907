"""Tensor maths without communication: selection, orthogonalisation, bit packing, seeded draws.

What does not live here: anything that knows of ranks or buckets (program/, methods/).
"""
