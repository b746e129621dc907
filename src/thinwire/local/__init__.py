"""Local steps: ranks train by themselves and average what has changed now and then.

``settings`` is what users choose, ``rounds`` what one rank does: plain arithmetic and a method's own program, so that
the engine and the tests' lockstep run the same text.
"""

from thinwire.local.settings import QSR, Local, Nesterov

__all__ = ["QSR", "Local", "Nesterov"]
