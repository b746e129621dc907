"""``thinwire.checkpoint.save`` and ``load``: the public name of :mod:`thinwire.engine.checkpoint`."""

from thinwire.engine.checkpoint import complete, load, save

__all__ = ["complete", "load", "save"]
