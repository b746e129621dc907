"""K-FAC: second-order preconditioning of averaged gradients, its factors and inverses exchanged by programs and plans.

What does not live here: how programs run (engine/), how messages are fused and work is placed (planner/).
"""

from thinwire.kfac.kfac import KFAC
from thinwire.kfac.plan import FactorLayer, KFACPlan
from thinwire.kfac.schedules import Choices, make_plan
from thinwire.kfac.stats import KFACStats

__all__ = ["KFAC", "Choices", "FactorLayer", "KFACPlan", "KFACStats", "make_plan"]
