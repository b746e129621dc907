"""Quantisers: a 1-D tensor as packed codes of 1, 2, 4 or 8 bits and a few scales, and back.

On a CPU a piece of the tensor goes through all passes before the next one does: it stays in the cache. On a GPU each
function is one Triton kernel, and every element is read and written once.
"""
