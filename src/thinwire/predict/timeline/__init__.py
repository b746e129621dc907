"""The timeline simulator: runs a method's own programs on shapes alone, with prices, in the engine's order."""

from thinwire.predict.timeline.result import LANES, Event, Timeline, write_trace
from thinwire.predict.timeline.simulate import bound_by, simulate

__all__ = ["LANES", "Event", "Timeline", "bound_by", "simulate", "write_trace"]
