"""``thinwire.checkpoint.save`` and ``load``: the public name of :mod:`thinwire.engine.state.checkpoint`."""

from thinwire.engine.state.checkpoint import complete, load, save

__all__ = ["complete", "load", "save"]
