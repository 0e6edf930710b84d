"""Finds the shard to which a request belongs, by the shard map that this node has applied (docs/spec/shards.md).

A request belongs to the owner of the topic in its path, or to the shard that issued the id or numbered the job in its
path. Without a map, and while this cluster is no shard of its map, every request is answered here: apply refuses what
it must not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hadelay.api.text import LONGEST_TOPIC, parse_id
from hadelay.codec.leasetokens import group_of
from hadelay.errors import BadRequest, Conflict, HadelayError, Misdirected
from hadelay.http.forwarding.forwarder import Destination
from hadelay.http.forwarding.heads import ForwardHead, shard_of
from hadelay.http.routes import Route
from hadelay.model import unpack_id
from hadelay.server.service.shards import ShardService
from hadelay.settings.shardmap import Shards, job_of

#: Routes that wait at the leader of the topics' shard: the client is redirected there, and the request is not
#: forwarded.
_REDIRECTED = frozenset(("receive", "receive_topics"))
#: Routes whose outcome is remembered under an Idempotency-Key, so that a forwarded request may be repeated.
KEYED = frozenset(("publish", "publish_batch", "trigger_schedule", "backfill_schedule"))
#: Limit of topics whose owners are cached; at the limit, the cache is emptied.
_MAX_OWNERS = 4_096
#: Variables of a path that name a topic, a message or a job.
_NAMING = frozenset(("topic", "id", "job"))
#: Stands for a shard that the map does not name, such as the issuer of a lease that was restored and is not in the map
#: yet.
UNKNOWN = -1


class Forwarded(NamedTuple):
    """A client's request that is forwarded unchanged to another shard. route: name of its route. again: whether more
    requests with the same head are expected, so that the head is cached."""

    to: Destination
    head: ForwardHead
    route: str
    again: bool = True

    def adding(self, name: bytes, value: bytes) -> Forwarded:
        """Copy of the request with one more header."""
        head = self.head
        lines = b"%b%b: %b\r\n" % (head.lines, name, value)
        keyed = name == b"Idempotency-Key" and self.route in KEYED
        return self._replace(head=head._replace(lines=lines, repeatable=head.repeatable or keyed))


class ShardRouter:
    """Decides which shard answers a request. view: has the shard map of this node. forget: clears the caches that
    depend on the map."""

    def __init__(self, view: ShardService, forget: Callable[[], None]) -> None:
        self.view, self._forget = view, forget
        self.known: Shards = view.known
        #: Index of this shard in the shard map; None without a map, or if this cluster is not in the map.
        self.here: int | None = None
        #: Whether the shard map has shards besides this one.
        self.several = False
        #: Topic → its owner, as `owner` returns it, for topics in recent requests.
        self._owners: dict[str, int | None] = {}
        #: Shard → its destination.
        self._destinations: dict[int, Destination] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take over the shard map that this node has applied, and clear all caches that depend on it. Call this once
        `view.replica.ledger.shards` is not `known`, the map taken over last."""
        self.known = self.view.known
        self._owners, self._destinations = {}, {}
        self.here = self.known.index_of(self.view.group)
        self.several = self.here is not None and len(self.others()) > 0
        self._forget()

    def look(self) -> None:
        if self.view.replica.ledger.shards is not self.known:
            self.refresh()

    def destination(self, shard: int) -> Destination:
        found = self._destinations.get(shard)
        if found is None:
            current = self.known.current
            assert current is not None
            found = self._destinations[shard] = Destination(shard, current.version, current.shards[shard].nodes)
        return found

    def known_shard(self, shard: int) -> Destination | None:
        """Destination of another shard; None if the map has no such shard, and for this shard."""
        self.look()
        current = self.known.current
        return None if current is None or shard == self.here or shard not in current.shards else self.destination(shard)

    def urls(self) -> set[str]:
        """URLs of all nodes of the map."""
        current = self.known.current
        return set() if current is None else {url for one in current.shards.values() for url in one.nodes.values()}

    def owner(self, topic: str) -> int | None:
        """The shard that owns a topic; None for this shard, and for a name that is too long, which this shard
        refuses."""
        if self.here is None or self.known.current is None or len(topic) > LONGEST_TOPIC:
            return None
        if topic in self._owners:
            return self._owners[topic]
        owner = self.known.current.owner(topic)
        if len(self._owners) >= _MAX_OWNERS:
            self._owners.clear()
        found = self._owners[topic] = None if owner == self.here else owner
        return found

    def reach(self, pattern: str) -> set[int]:
        """Shards that may own topics that a pattern matches."""
        assert self.known.current is not None
        return self.known.current.reach(pattern)

    def issuer(self, group: int) -> int | None:
        """The shard that issued ids and leases with this group number; None for this shard, and for an unknown
        number."""
        if self.here is None or self.known.current is None:
            return None
        issuer = self.known.current.issuer(group)
        return None if issuer == self.here else issuer

    def choose(self, query: str) -> tuple[int | None, str]:
        """Take the option `shard` out of a query: (shard, None if the query names none; rest of the query). Raises
        BadRequest for an unknown shard, and if this cluster is no shard of its map: the request may be meant for
        another cluster."""
        if "shard=" not in query:
            return None, query
        current, pairs = self.known.current, query.split("&")
        given = [pair.partition("=")[2] for pair in pairs if pair.startswith("shard=")]
        if given and (current is None or self.here is None):
            what = "has no shard map" if current is None else "is in no shard of its map (see `hadelay shards apply`)"
            raise BadRequest(f"shard: this cluster {what}: leave the shard out")
        if len(given) > 1 or (given and current is not None and given[0] not in map(str, current.shards)):
            raise BadRequest(f"shard: {given[0][:20]!r}: name one shard of the map: {self.all}")
        rest = "&".join(pair for pair in pairs if not pair.startswith("shard="))
        return (int(given[0]) if given else None), rest

    @property
    def all(self) -> str:
        """Indexes of the map's shards, as text for errors."""
        return ", ".join(map(str, self.known.current.shards if self.known.current is not None else ()))

    def others(self) -> list[Destination]:
        """All shards of the map but this one."""
        current = self.known.current
        return [] if current is None else [self.destination(shard) for shard in current.shards if shard != self.here]

    def judge(
        self, route: Route, path: Mapping[str, str], forwarded: str | None, chosen: int | None = None
    ) -> Destination | None:
        """Shard to which a request is forwarded; None: this node answers it. forwarded: the request's Hadelay-Shard
        header. chosen: the shard that the query names; BadRequest if the topic, id or job in the path belongs to
        another shard. Raises Misdirected for a forwarded request that belongs to another shard."""
        if forwarded is None and (self.here is None or route.name in _REDIRECTED or not route.described):
            return None
        to = self.of(path, forwarded)
        if chosen is not None and _NAMING.intersection(path):
            self.check(chosen, to)
        if to is not None or forwarded is not None or chosen in (None, self.here) or _NAMING.intersection(path):
            return to
        return self.destination(chosen)

    def check(self, chosen: int | None, to: Destination | None) -> None:
        """Raise BadRequest if the query names the shard `chosen`, but the request's topic, id or job belongs to another
        shard. to: the shard that it belongs to; None: this one."""
        owner = self.here if to is None else to.shard
        if chosen is not None and owner is not None and chosen != owner:
            raise BadRequest(
                f"the topic, id or job belongs to shard {owner}, and the request names shard {chosen}: leave the "
                "shard out (?shard=, --shard, HADELAY_SHARD, or shard= of the client)"
            )

    def of(self, path: Mapping[str, str], forwarded: str | None) -> Destination | None:
        """The shard of the topic, id or job in a path; None for this one. Raises Misdirected as `judge` does."""
        foreign = None if self.here is None else self._foreign(path)
        if forwarded is None:
            return None if foreign is None else self.destination(foreign)
        shard, version = shard_of(forwarded)
        if self.here is not None and (foreign is not None or shard != self.here):
            raise self._misdirected(self.here if foreign is None else foreign, version)
        return None

    def _foreign(self, path: Mapping[str, str]) -> int | None:
        if "topic" in path:
            return self.owner(path["topic"])
        if "id" in path:
            try:
                return self.issuer(unpack_id(parse_id(path["id"]))[0])
            except HadelayError:
                return None
        if "job" in path and self.known.current is not None:
            shard, _ = job_of(path["job"])
            return shard if shard != self.here and shard in self.known.current.shards else None
        return None

    def _misdirected(self, shard: int, version: int) -> Misdirected:
        to = self.destination(shard)
        what = (
            f"this is shard {self.here}; by version {to.version} of the shard map, the request belongs to shard {shard}"
            f" (it was sent by version {version})"
        )
        return Misdirected(what, shard=shard, map_version=to.version, nodes=to.urls)

    def of_lease(self, lease: str) -> int | None:
        """The shard that issued a lease; None for this shard, and for text that is no lease. UNKNOWN: no shard of the
        map has the lease's group number, or this cluster is no shard of the map."""
        current, number = self.known.current, group_of(lease)
        if current is None or number is None or number == self.view.group:
            return None
        issuer = None if self.here is None else current.issuer(number)
        return UNKNOWN if issuer is None else None if issuer == self.here else issuer

    def of_topics(self, topics: Iterable[str], forwarded: str | None) -> Destination | None:
        """The one shard that owns these topics; None for this one. Raises Conflict if there are several; Misdirected as
        `judge` does."""
        if self.here is None:
            return None
        shares: dict[int, list[str]] = {}
        for topic in topics:
            owner = self.owner(topic)
            shares.setdefault(self.here if owner is None else owner, []).append(topic)
        if len(shares) > 1:
            names: dict[str, Any] = {str(shard): some for shard, some in sorted(shares.items())}
            what = "these topics belong to several shards: receive from each shard on its own"
            raise Conflict(f"{what} (`shards` has the topics of each)", shards=names)
        (shard,) = shares
        if shard == self.here:
            return None
        if forwarded is not None:
            raise self._misdirected(shard, shard_of(forwarded)[1])
        return self.destination(shard)
