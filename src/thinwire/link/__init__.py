"""Two processes that find one another over TCP live here: who may come in, TLS, the hello, tensors, time limits.
What does not live here: what the frames say (``parameter_server``), the ranks of one job (``collectives``).
"""
