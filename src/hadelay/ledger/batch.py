"""A PUBLISH on its way through apply: the command, its result, and the decisions so far."""

from dataclasses import dataclass, field

import numpy as np

from hadelay.codec.formats import I64, U32, Mask
from hadelay.codec.publishcommand import Publish
from hadelay.codec.results import PublishResult, RowCode


@dataclass(slots=True)
class Batch:
    command: Publish
    result: PublishResult
    #: Rows that are still to be filed.
    take: Mask
    #: Due time of each row, in Unix ms.
    deliver_at_ms: I64
    #: Number of each of the command's topics; 0 for those that no row of `take` names.
    topics: U32 = field(init=False)

    def __post_init__(self) -> None:
        self.topics = np.zeros(len(self.command.topics), np.uint32)

    def refuse(self, wrong: Mask, code: RowCode) -> None:
        """Refuse those of the `wrong` rows that are still to be filed."""
        self.result.codes[self.take & wrong] = code
        self.take &= ~wrong
