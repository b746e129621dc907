"""The built-in workloads, and the registry of their names. Nothing here communicates or keeps time."""
