"""Checks of the promises, one function each; the docstring is the definition. SimCluster checks I13, I14, I17 and, for
I12, entries and results during the run. I4 does not occur, since producers repeat until the outcome is known; I7 is a
count (`redelivered`), and I11, the order of hand-outs, is not promised.

All but the replica checks read the history: what the outside saw on the true clock; of the log they take when a grant
was committed. Each case counts (`History.decide`): what never came up was not tested.
"""

from collections import defaultdict

from chaos.sim import fanout, transfers
from chaos.sim.batches import batches_called_back
from chaos.sim.cluster import SimCluster
from chaos.sim.evidence import WAITING, forgets, found_by_key_of, latest, lease_began, published_ms, where
from chaos.sim.grouporder import groups_apart, groups_in_order, groups_in_pace, groups_in_runs, groups_released
from chaos.sim.history import Message, Violation, number_of
from chaos.sim.jobcheck import FILTERS
from chaos.sim.leases import calls_apart, dead_is_over, double_leases, fenced, marked, resurrected
from chaos.sim.replicas import conserved, diverged, honest, nothing_forgotten, one_per_key
from chaos.sim.times import clock_runs_true, debounced, early, in_time, late
from chaos.sim.views import seen
from hadelay.ledger.hours.lookup import EntryRef
from hadelay.ledger.jobs.bulkjob import JOB_COUNTS
from hadelay.ledger.leases.ackresults import result_of
from hadelay.ledger.schedules.schedules import agenda
from hadelay.ledger.topics.topicchanges import DEAD, READY, SCHEDULED
from hadelay.model import Event, State

#: Time in seconds after the end of all faults: messages due until then have to be settled at the end of a run. It is
#: longer than the usual delays, and shorter than the drain.
_SOON_S = 20.0
#: Limit, in seconds: a bulk job that takes longer than this because of its rate limit need not end within the run.
_RATED_S = 30.0
#: Time, in ms, by which a schedule may be overdue at the end of a run.
OVERDUE_MS = 2_000


def lost(cluster: SimCluster) -> None:
    """I1: a message whose publish was confirmed still waits or is leased, unless it ended in a way that a client asked
    for. (I15 checks that no due message still waits.)"""
    nodes, history = latest(cluster), cluster.history
    if not nodes:
        return
    by_id: dict[int, list[Message]] = defaultdict(list)
    unanswered: dict[tuple[str, bytes | None], list[Message]] = defaultdict(list)
    for message in history.messages:
        if message.id is not None:
            # Several messages may have one id: a publish gets the id of the pending message that has the same key
            by_id[message.id].append(message)
        elif message.client_key:
            unanswered[message.topic, message.client_key].append(message)
    acked = {h.id for h in history.hand_outs if h.ack_invoked is not None}
    for message_id, messages in by_id.items():
        place, state = where(nodes[0], message_id)
        history.count(f"ends {state}")
        over = state == State.ACKED or (state == "gone" and forgets(cluster, messages[0]))
        kept = state in WAITING or (over and message_id in acked)
        # The stored message may be one whose publisher never got an answer.
        stored = [*messages, *(other for m in messages for other in unanswered[m.topic, m.client_key])]
        broken = not kept and not any(_may_end(cluster, message, message_id, state, place) for message in stored)
        text = f"message {messages[0].number} ({message_id:x}) was stored and is {state}"
        history.decide("I1 lost", broken, text, message_id)


def _may_end(cluster: SimCluster, message: Message, message_id: int, state: str, place: EntryRef | None) -> bool:
    """Whether a client's request or a setting may have ended the message in the state `state`."""
    history, workload = cluster.history, cluster.workload
    purged = 0
    for order in history.meant("purge", message, message_id):
        purged |= order.states
    gone = state == "gone" and forgets(cluster, message)
    if state == State.CANCELLED or gone:
        by_key = (message.topic, message.client_key) in history.cancelled_keys
        replaced = by_key or history.may_be_replaced(message, message_id)
        cancelled = message.cancel_invoked is not None or bool(history.meant("job cancel", message, message_id))
        if replaced or cancelled or purged & (SCHEDULED | READY):
            return True
    if state == State.EXPIRED or gone:
        return bool(message.ttl_ms or (gone and purged & DEAD))
    if state == State.DEAD and place is not None:
        tried = int(place.rows["attempt"][0]) >= workload.max_attempts
        given_up = any(h.given_up for h in history.hand_outs if h.id == message_id)
        return message.topic == workload.limited and (tried or given_up)
    return state == "gone" and bool(purged & DEAD)


def results_kept(cluster: SimCluster) -> None:
    """Results: a reader gets the result that an ack carried, if the ack was answered `acked`. Exempt are the
    administrator's topic and a topic with a brief retention, where the retention may be over."""
    nodes, history = latest(cluster), cluster.history
    for h in history.hand_outs if nodes and not history.slept else ():
        message = history.message_of(h.body)
        aside = (cluster.workload.limited, cluster.workload.brief)
        if h.result_taken and message is not None and message.topic not in aside:
            found = result_of(nodes[0].ledger, h.id)
            text = f"the ack of {h.id:x} carried {h.result!r}, and the cluster has {found!r}"
            history.decide("results", found != h.result, text, h.id)


def cancelled_means_never(cluster: SimCluster) -> None:
    """I3, cancel: no message is handed out after its cancel was confirmed."""
    history = cluster.history
    for message in history.messages:
        if message.cancelled is not None:
            late = any(h.id == message.id and h.answered > message.cancelled for h in history.hand_outs)
            text = f"message {message.number} handed out after its cancel"
            history.decide("I3 phantom, cancelled", late, text, message.id)


def purged_means_never(cluster: SimCluster) -> None:
    """I3, purge of waiting messages: a message stored before the purge is not leased after the purge was confirmed,
    unless it was a dead letter and is redriven."""
    history, waits = cluster.history, SCHEDULED | READY
    purges = [o for o in history.orders if o.kind == "purge" and o.answered is not None and o.states & waits == waits]
    for h in history.hand_outs if purges else ():
        message, (begun, _) = history.message_of(h.body), lease_began(cluster, h)
        if message is None or message.stored is None or message.topic != cluster.workload.limited:
            continue
        redrives = history.meant("redrive", message, h.id)
        for order in purges:
            if message.stored < order.invoked:
                late = order.answered is not None and begun > order.answered
                # A redrive of all dead letters (no ids) may continue long after its answer.
                redriven = any(r.between(order.invoked if r.ids else 0.0, h.answered) for r in redrives)
                text = f"message {message.number} handed out after a purge"
                history.decide("I3 phantom, purged", late and not redriven, text, message.id)


def as_published(cluster: SimCluster) -> None:
    """I3: each message that is handed out was published, with this body and these tags. Filters: a receive with a tag
    filter gets only matching messages."""
    decide = cluster.history.decide
    for h in cluster.history.hand_outs:
        message = cluster.history.message_of(h.body)
        decide("I3 phantom", message is None, f"{h.id:x} carries a body that nobody sent", h.id)
        if message is not None:
            text = f"{h.id:x} is not message {message.number}"
            decide("I3 phantom, body", message.body != h.body, text, h.id)
            text = f"message {message.number}, which was refused, is handed out as {h.id:x}"
            decide("I3 phantom, refused", message.absent, text, h.id)
            if message.tags or h.tags:
                text = f"{h.id:x} has the tags {h.tags}, not {message.tags}"
                decide("I3 phantom, tags", message.tags != h.tags, text, h.id)
        if h.wanted is not None:
            every, some, tags = set(h.wanted.all_of), set(h.wanted.any_of), set(h.tags)
            text = f"{h.id:x}, with the tags {h.tags}, went to {h.consumer}, who asked for {h.wanted}"
            decide("filters", not every <= tags or bool(some and not some & tags), text, h.id)


def two_ids(cluster: SimCluster) -> None:
    """I8: one idempotency key is one message with one id, in every answer and every hand-out, if the key was remembered
    when the second message was published."""
    history = cluster.history
    for n, first, other in history.second_ids:
        text = f"message {n} got ids {first:x} and {other:x}"
        if not _forgotten(cluster, first, other):
            raise Violation("I8 duplicate, answered", text, frozenset({first, other}))
    seen = {m.number: m.id for m in history.messages if m.id is not None}
    for h in history.hand_outs:
        number = number_of(h.body)
        if number is not None:
            known = seen.setdefault(number, h.id)
            text = f"message {number} is {known:x}, and handed out as {h.id:x}"
            broken = known != h.id and not _forgotten(cluster, known, h.id)
            history.decide("I8 duplicate, handed out", broken, text, h.id, known)


def _forgotten(cluster: SimCluster, *ids: int) -> bool:
    """Whether the idempotency key of the first of two messages may have been forgotten when the second was published,
    or whether the cluster has forgotten one of the messages by now."""
    for node in latest(cluster):
        first, second = sorted(published_ms(node, message_id) for message_id in ids)
        unknown = cluster.history.slept or bool(cluster.workload.brief)
        forgotten = second - first >= cluster.window_ms if first else unknown
        cluster.history.count("stored again when its key was forgotten", forgotten)
        return forgotten
    return True


def converged(cluster: SimCluster, drained: bool, seconds: float) -> None:
    """I15: within a time limit after all faults are healed, one node leads, every node has applied all entries, and no
    due message or dead letter is left: each was acked, or ended as clients asked."""
    nodes = cluster.nodes()
    leaders = [node.name for node in nodes if node.leading]
    applied = {node.name: (node.raft.applied_index, node.raft.last_index) for node in nodes}
    left = unsettled(cluster)
    text = f"{seconds:.1f} s after healing: leaders {leaders}, applied {applied}, {len(left)} messages not settled"
    cluster.history.decide("I15 liveness", not drained, text, *(m.id for m in left[:1]))


def unsettled(cluster: SimCluster) -> list[Message]:
    """Messages due until _SOON_S after the end of all faults that neither a client nor the leader knows as settled."""
    done = {h.id for h in cluster.history.hand_outs if h.acked is not None}
    now_ms = max((node.ledger.now_ms for node in cluster.nodes()), default=0)
    until_ms = now_ms + (_SOON_S - max(cluster.world.now - cluster.healed_at, 0.0)) * 1000
    return [
        m
        for m in cluster.history.messages
        if m.id not in done
        and m.cancelled is None
        and not m.refused
        and not (m.deliver_at_ms is not None and m.deliver_at_ms > until_ms)
        and not (m.id is not None and _settled(cluster, m.id, m))
    ]


def _settled(cluster: SimCluster, message_id: int, message: Message) -> bool:
    """Whether the message ended without a confirmation to a client: the answer was lost, or its TTL or a purge ended
    it. Also True for a dead letter that cannot be redriven, because a pending message has its client key."""
    leader = cluster.leader()
    if leader is None:
        return False
    state = where(leader, message_id)[1]
    if state == State.DEAD and message.client_key:
        other = found_by_key_of(leader.ledger, message_id)
        return other != message_id and where(leader, other)[1] in (State.SCHEDULED, State.BLOCKED)
    return state not in (*WAITING, State.DEAD)


def unfinished_jobs(cluster: SimCluster) -> list[int]:
    """Numbers of the bulk jobs that have not ended, according to the leader. Left out are jobs that their rate limits
    have kept busy for longer than _RATED_S: a job of hundreds of messages at four a second does not end within a
    run."""
    leader = cluster.leader()
    running = [] if leader is None else [job for job in leader.ledger.jobs.values() if not job.ended_ms]
    return [job.number for job in running if job.spec.rate is None or job.done < job.spec.rate * _RATED_S]


def unreported(cluster: SimCluster) -> bool:
    """Whether the topic with alerts has deaths that no alert has reported yet, according to the leader."""
    leader = cluster.leader()
    receiver = cluster.receiver
    if leader is None or receiver is None or not receiver.good or cluster.history.limited is None:
        return False
    topic = leader.ledger.topic(cluster.workload.limited)
    return topic is not None and topic.settings.alert is not None and topic.settled[Event.DEAD] > topic.alerted


def alerted(cluster: SimCluster) -> None:
    """Alerts: each death is in an alert that the receiver took, and each alert counts the deaths that it stands for.
    (I15: in the end every death is reported.)"""
    receiver = cluster.receiver
    for node in latest(cluster) if receiver is not None else ():
        topic, end = node.ledger.topic(cluster.workload.limited), 0
        for began, upto, died in sorted(receiver.alerts) if receiver is not None else ():
            text = f"an alert tells of the deaths from {began} to {upto} of {cluster.workload.limited}: {died}"
            cluster.history.decide("alerts", began > end or died != upto - began, f"{text}; known to {end}")
            end = max(end, upto)
        if topic is not None:
            text = f"{topic.alerted} deaths count as reported, and alerts reported {end}"
            cluster.history.decide("alerts", topic.alerted > end, text, who=node.name)


def jobs_once(cluster: SimCluster) -> None:
    """J1: no message is in two steps of one bulk job (`Watch._note_step`), and the counts of a job add up to its
    messages. Fills are exempt, because they also copy messages outside their steps (F1 checks their copies). I15 checks
    that jobs end."""
    for node in cluster.nodes()[:1]:
        for job in node.ledger.jobs.values():
            for shape in (job.spec.action, *(name for name in FILTERS if getattr(job.spec, name))):
                cluster.history.count(f"job {shape} done", job.done)
            if job.spec.action == "fill":
                continue
            judged = sum(getattr(job, name) for name in JOB_COUNTS)
            known = len(cluster.judged[job.number]) if job.number in cluster.judged else judged
            text = f"job {job.number} at {job.cursor} counts {judged} messages, and its steps had {known}"
            cluster.history.decide("J1 jobs, counts", judged != known, text)


def overdue(cluster: SimCluster) -> list[tuple[int, str]]:
    """(time of the occurrence, name) of each active schedule whose next occurrence is overdue, according to the
    leader."""
    leader = cluster.leader()
    if leader is None or not leader.ledger.schedules.count:
        return []
    return [(next_ms, name) for _, next_ms, name in agenda(leader.ledger, b"", leader.now_ms() - OVERDUE_MS, 5)]


def schedules_fired(cluster: SimCluster) -> None:
    """S5: after all faults are healed, the next occurrence of no active schedule is overdue."""
    leader = cluster.leader()
    if leader is not None and leader.ledger.schedules.count:
        found = overdue(cluster)
        text = f"at {leader.now_ms()}, these schedules wait for their times: {found}"
        cluster.history.decide("S5 schedules, overdue", bool(found), text, who=leader.name)


def fanned_out(cluster: SimCluster) -> None:
    """F1: each message published to a topic with subscriptions has its copies, in the states that clients know."""
    for node in cluster.nodes()[:1]:
        fanout.check(cluster.history, node)


def results_last(cluster: SimCluster) -> None:
    """Results: each result whose retention is not over can be read."""
    for node in cluster.nodes()[:1] if not cluster.rotten else ():
        cluster.features.kept(node.ledger)


def transferred(cluster: SimCluster) -> None:
    """I1, of the topics between which jobs transfer messages: each message is in one of them, until clients end it."""
    for node in cluster.nodes()[:1] if not cluster.rotten else ():
        transfers.kept(cluster.history, node.ledger)


def called_back(cluster: SimCluster) -> None:
    """C1: in a topic that asks for callbacks, each ack and each death has one callback."""
    for node in cluster.nodes()[:1]:
        fanout.check_callbacks(cluster.history, node)


#: Checks that read the clients' history, and checks that compare the nodes after all faults are healed.
OUTSIDE = (
    as_published, two_ids, lost, cancelled_means_never, purged_means_never, results_kept, fenced, resurrected,
    dead_is_over, double_leases, marked, early, clock_runs_true, calls_apart, in_time, debounced, nothing_forgotten,
    late, groups_apart, groups_in_order, groups_in_pace, groups_in_runs, groups_released, schedules_fired, alerted,
)  # fmt: skip
REPLICAS = (diverged, conserved, seen, one_per_key, honest, jobs_once, fanned_out, called_back, results_last,
            batches_called_back, transferred)  # fmt: skip
