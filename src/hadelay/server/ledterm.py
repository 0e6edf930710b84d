"""The term that a node leads, shared by those parts of the node that propose commands."""

from dataclasses import dataclass


@dataclass(slots=True)
class LedTerm:
    #: The term in which this node leads and may propose commands: cluster time is known, and all entries of earlier
    #: terms are applied. 0 while this node does not lead.
    number: int = 0
