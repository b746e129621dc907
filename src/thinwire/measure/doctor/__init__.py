"""A machine's facts, as a bug report needs them, and problems of its network set-up, in plain words.

Measurements of the network belong to ``measure/probe.py``, printing to cli/.
"""

from thinwire.measure.doctor.collect_facts import collect_facts
from thinwire.measure.doctor.facts import Facts, Interface, Name
from thinwire.measure.doctor.judge import Diagnosis, judge
from thinwire.measure.doctor.sockets import Choice

__all__ = [
    "Choice",
    "Diagnosis",
    "Facts",
    "Interface",
    "Name",
    "collect_facts",
    "judge",
]
