"""The built-in workloads, one model a file, and the registry of their names.

What does not live here: text (corpus.py), timing (rounds.py), anything that communicates.
"""
