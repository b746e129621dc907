"""Connections between two processes over TCP: who may connect, TLS, the hello, tensors, time limits.

Not here: what the frames mean (``parameter_server``), the ranks of one job (``collectives``).
"""
