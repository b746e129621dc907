"""Systems of their own around training, each with its verbs of the command line in ``cli.py``."""
