"""A machine's facts, as a bug report needs them, and problems of its network set-up, in plain words.

Measurements of the network belong to ``predict/measure/probe.py``, printing to tools/cli/.
"""

from thinwire.predict.measure.facts import Facts, Interface, Name
from thinwire.predict.measure.network import Choice
from thinwire.tools.doctor.collect_facts import collect_facts
from thinwire.tools.doctor.judge import Diagnosis, judge

__all__ = ["Choice", "Diagnosis", "Facts", "Interface", "Name", "collect_facts", "judge"]
