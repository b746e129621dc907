"""Tensor maths without communication: selection, orthogonalisation, bit packing, seeded draws.

Not here: anything that depends on ranks or buckets (core/program/, core/methods/).
"""
