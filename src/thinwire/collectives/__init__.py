"""The words of the language on real process groups: lanes, transport, byte ledger.

What does not live here: when an op is issued (engine/) and what it is for (methods/).
"""
