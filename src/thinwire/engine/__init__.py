"""Run the methods' programs on real ranks during backward: hooks, order, state, checkpoints, ``attach``.

Not here: what is exchanged (core/methods/) and how a collective is carried out (core/collectives/).
"""
