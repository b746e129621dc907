"""The ops of programs on real process groups: lanes, transport, byte ledger.

Not here: when an op is issued (engine/), and what it is for (core/methods/).
"""
