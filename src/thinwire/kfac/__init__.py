"""K-FAC: second-order preconditioning of averaged gradients; programs and plans exchange its factors and inverses.

Not here: how programs run (engine/), how messages are fused and work is placed (planner/).
"""

from thinwire.kfac.kfac import KFAC
from thinwire.kfac.plan import KFACPlan
from thinwire.kfac.scheduled import stepped
from thinwire.kfac.schedules import Choices, make_plan

__all__ = ["KFAC", "Choices", "KFACPlan", "make_plan", "stepped"]
