"""The timeline simulator: a method's own programs on shapes alone, priced, in the order in which the engine runs them.

What does not live here: prices (planner/costs, the methods), real runs (engine/), decisions (planner/choose).
"""

from thinwire.planner.timeline.bottleneck import bound_by
from thinwire.planner.timeline.result import LANES, Event, Timeline
from thinwire.planner.timeline.simulate import simulate
from thinwire.planner.timeline.trace_json import write_trace

__all__ = ["LANES", "Event", "Timeline", "bound_by", "simulate", "write_trace"]
