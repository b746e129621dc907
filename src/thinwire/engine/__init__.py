"""Runs the methods' programs on real ranks while autograd goes on: hooks, order, state, checkpoints, ``attach``.

What does not live here: what is exchanged (methods/) and how a collective is carried out (collectives/).
"""
