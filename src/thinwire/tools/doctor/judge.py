"""From facts to findings: a pure function, so that any machine can be judged anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.predict.measure.facts import Facts
from thinwire.predict.measure.network import Choice, gloo_choice, nccl_choice
from thinwire.tools.doctor.environment import environment, launch, nodes_of
from thinwire.tools.doctor.findings import ERROR, NOTE, WARNING, Finding, Setting
from thinwire.tools.doctor.quality import quality
from thinwire.tools.doctor.reachability import reachability

_ORDER = (ERROR, WARNING, NOTE)


@dataclass(frozen=True)
class Diagnosis:
    """The conclusions from the facts.

    Attributes:
        nodes: machines of the job, as given or as in torchrun's variables; None: unknown.
        gloo, nccl: what the backends will use; ``nccl`` is None if there is no GPU for it.
        findings: the worst first.
    """

    nodes: int | None
    gloo: Choice
    nccl: Choice | None
    findings: tuple[Finding, ...]

    @property
    def prevents_training(self) -> bool:
        """Whether some finding prevents training."""
        return any(finding.level == ERROR for finding in self.findings)


def judge(facts: Facts, nodes: int | None = None) -> Diagnosis:
    """Return the findings for a machine.

    Args:
        facts: facts of the machine.
        nodes: machines of the job; None: as in torchrun's variables, if they are set.

    Returns:
        What Gloo and NCCL will use, and the findings.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1")
    nodes = nodes or nodes_of(facts)
    gloo = gloo_choice(facts)
    nccl = nccl_choice(facts) if facts.gpus and "nccl" in facts.backends else None
    setting = Setting(facts, gloo, nccl, nodes)
    found = [finding for check in (launch, reachability, quality, environment) for finding in check(setting)]
    return Diagnosis(nodes, gloo, nccl, tuple(sorted(found, key=lambda finding: _ORDER.index(finding.level))))
