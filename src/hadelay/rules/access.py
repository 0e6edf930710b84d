"""Rights of one request: the scopes that it needs to read or change a message or a job."""

from hadelay.api.messages import Message
from hadelay.api.service import Actor
from hadelay.codec.jobcommands import ON_DEAD
from hadelay.errors import Forbidden
from hadelay.model import SEPARATOR
from hadelay.rights import Rights


class RequestRights:
    def __init__(self, actor: Actor, rights: Rights, *, first_only: bool = False) -> None:
        self.actor, self.rights = actor, rights
        #: True for the bootstrap token, which may only create a token.
        self.first_only = first_only

    def may(self, scope: str, topic: str | None) -> bool:
        return self.rights.may(scope, topic)

    def need(self, scope: str, topic: str | None) -> None:
        """Raises Forbidden if the token lacks a scope for a topic. topic: None for all topics and the cluster."""
        if not self.rights.may(scope, topic):
            where = "for the whole cluster" if topic is None else f"for topic {topic[:128]!r}"
            raise Forbidden(f"the token {self.actor.token!r} has no scope {scope} {where}")

    def need_of(self, scope: str, topic: str, what: str) -> None:
        """Raises Forbidden if the token lacks a scope for the topic of a message or lease. The error does not name the
        topic, which the token may not know."""
        if not self.rights.may(scope, topic):
            raise Forbidden(f"the token {self.actor.token!r} has no scope {scope} for the topic of this {what}")


#: Rights of requests that need no token.
UNRESTRICTED = RequestRights(Actor(), Rights(("admin",)))


def need_publish(access: RequestRights, message: Message[str]) -> None:
    """Raises Forbidden if the token may not change the message. A token that may publish to a topic may also change the
    copies for its subscriptions. If the message itself was routed to another topic, the token needs the scope for that
    topic as well."""
    copies = [copy.topic for copy in message.copies or () if SEPARATOR in copy.topic]
    for topic in {name.partition(SEPARATOR)[0] for name in (message.topic, *copies)}:
        access.need_of("publish", topic, "message")


def need_read(access: RequestRights, topic: str) -> None:
    """Raises Forbidden if the token may not read a message of the topic. A token that may read a topic may also read
    the copies for its subscriptions."""
    if not access.may("read", topic):
        access.need_of("read", topic.partition(SEPARATOR)[0], "message")


def need_job(access: RequestRights, action: str, topic: str) -> None:
    """Raises Forbidden if the token lacks the scope of the action for all topics of the pattern."""
    access.need(job_scope(action), covered(topic))


def need_begin(access: RequestRights, action: str, topic: str, into: str | None, member: str = "`into`") -> None:
    """Raises Forbidden if the token may not begin the job. into: the topic that messages are transferred to; None or
    empty: each goes back to the topic in which it died, which may be any. member: name of `into` in the request, for
    the error text."""
    need_job(access, action, topic)
    if into:
        access.need("publish", into)
    elif action == "transfer" and not access.may("publish", None):
        what = f"the token {access.actor.token!r} has no scope publish for all topics"
        raise Forbidden(
            f"{what}, and each message would go back to the topic in which it died, which may be any: "
            f"name one with {member}"
        )


def job_scope(action: str) -> str:
    """Scope that a token needs to begin a job of this action, or to stop it."""
    return "admin" if action in ON_DEAD or action in ("fill", "transfer") else "publish"


def covered(pattern: str) -> str | None:
    """The topic or pattern that a token's scope has to cover for a job on this pattern; None: all topics."""
    return None if not pattern.strip("*") else pattern
