"""K-FAC: second-order preconditioning of averaged gradients; programs and plans exchange its factors and inverses.

Not here: how programs run (engine/), how messages are fused and work is placed (core/pricing/).
"""

from thinwire.systems.kfac.kfac import KFAC
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.scheduled import stepped
from thinwire.systems.kfac.schedules import Choices, make_plan

__all__ = ["KFAC", "Choices", "KFACPlan", "make_plan", "stepped"]
