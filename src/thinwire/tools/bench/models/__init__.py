"""The built-in workloads, one model per file, and the registry of their names.

Text belongs to corpus.py, timing to round_robin.py; nothing here communicates.
"""
