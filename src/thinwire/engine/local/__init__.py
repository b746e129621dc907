"""Local steps: ranks train independently, and average what has changed every few steps.

``settings`` is what users choose. ``rounds`` is what one rank does: plain arithmetic and a method's own program, so the
engine and the tests' lockstep run the same code.
"""

from thinwire.engine.local.settings import QSR, Local, Nesterov

__all__ = ["QSR", "Local", "Nesterov"]
