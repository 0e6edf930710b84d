"""Fan-out of a PUBLISH: which messages are copied to which subscriptions of their topics.

A subscription `orders~billing` is a topic whose messages are copies of those published to the topic `orders`: with an
id, state, retries and dead letters of their own, but with the record of the published message (ADR 244).
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import U32, Mask
from hadelay.codec.meta import Filter, tags_in
from hadelay.codec.publishcommand import GAP, Publish
from hadelay.ledger.messages.keys import Batch
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState


@dataclass(slots=True)
class FanOut:
    #: Which rows of the command are filed in the queue of their own topic.
    own: Mask
    #: Subscriptions with the rows that each of them gets.
    copies: list[tuple[TopicState, Mask]]

    def entries(self, batch: Batch) -> tuple[NDArray[np.intp], U32, Mask]:
        """The entries to file for the rows of batch.take, those of one message behind one another: (row of each entry,
        number of its topic, whether it shares the record of the entry before it)."""
        own = np.flatnonzero(batch.take & self.own)
        rows, numbers = [own], [batch.topics[batch.command.rows["topic"][own]]]
        for subscription, mask in self.copies:
            rows.append(np.flatnonzero(batch.take & mask))
            numbers.append(np.full(len(rows[-1]), subscription.number, np.uint32))
        row, number = np.concatenate(rows), np.concatenate(numbers)
        order = row.argsort(kind="stable")
        row = row[order]
        return row, number[order], np.append(False, row[1:] == row[:-1])

    def has_only(self, row: int, full: Collection[int]) -> bool:
        """Whether the row is filed in no other queue than in these subscriptions (numbers of their topics)."""
        return not (self.own[row] or any(mask[row] and to.number not in full for to, mask in self.copies))

    def drop(self, row: int, full: Collection[int]) -> None:
        """Remove the row's copies for these full subscriptions, and count them as dropped. A row that no subscription
        gets is filed in the queue of its own topic."""
        self.own[row] |= self.has_only(row, full)
        for subscription, mask in self.copies:
            if mask[row] and subscription.number in full:
                mask[row] = False
                subscription.dropped += 1


def fan_out(ledger: Ledger, batch: Batch) -> FanOut | None:
    """Find the subscriptions that get copies of the rows of batch.take; None if no subscription gets any. With
    own_queue false, the queue of a topic gets only the rows that no subscription gets."""
    command, copies = batch.command, []
    own = np.ones(len(command.rows), np.bool_)
    for at, name in enumerate(command.topics if ledger.topics.subscriptions else ()):
        found = ledger.topics.subscriptions_of(name)
        if not found:
            continue
        mine = batch.take & (command.rows["topic"] == at)
        taken = np.zeros(len(own), np.bool_)
        for subscription in found:
            passing = mine.copy() if subscription.filter is None else _passing(command, mine, subscription.filter)
            if passing.any():
                copies.append((subscription, passing))
                taken |= passing
        topic = ledger.topic(name)
        if topic is not None and not topic.settings.own_queue:
            own &= ~taken
    return FanOut(own, copies) if copies else None


def _passing(command: Publish, rows: Mask, wanted: Filter) -> Mask:
    """Which of these rows pass the filter, by the tags in their meta."""
    passing = rows & wanted.may(command.rows["tag_mask"])
    for row in np.flatnonzero(passing).tolist():
        passing[row] = wanted.matches(tags_in(meta_of(command, row)))
    return passing


def meta_of(command: Publish, row: int) -> memoryview:
    start = int(command.starts[row]) + len(GAP)
    return command.blob[start : start + int(command.rows["meta_size"][row])]
