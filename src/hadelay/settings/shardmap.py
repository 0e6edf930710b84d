"""The shard map: which shard owns a topic (docs/spec/shards.md).

A shard is a cluster with a Raft group of its own. All shards store the same map in their logs, and `owner` is a pure
function of map and name: every process and every replica finds the same shard. A map is never changed in place; a
change replaces the whole object, so that caches notice the change by comparing identities.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hadelay.model import SEPARATOR
from hadelay.rights import covers
from hadelay.settings.kinds import TOPIC_NAME

#: Limits of a map: number of shards, of rules, and of pinned names; a larger map is refused.
MAX_SHARDS, MAX_RULES, MAX_PINNED = 128, 100, 50_000
#: Limit of prepared maps without a COMMIT that a shard keeps in `replaced`. Another shard may have a map in force that
#: is beyond the limit, so at the limit the shard creates no topic until a change of the map is completed.
MAX_REPLACED = 4
#: Limits of one shard in a map: number of its former group numbers, of its nodes, and bytes of a node's name and URL.
MAX_FORMER, MAX_NODES, MAX_NODE_NAME, MAX_URL = 16, 64, 64, 255
#: Count of job numbers per shard: users see a job as its shard's index times this, plus its number in the shard.
JOBS = 10**12
_JOB_DIGITS = len(str(MAX_SHARDS * JOBS))
#: Pattern that matches each name; the last rule of a map has this pattern.
ALL = "*"
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,128}")
#: Pattern of a node's URL. No URL parser is used: apply checks the URL, so all versions of Python must judge it alike.
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_TRAILING = re.compile(r"[0-9]+\Z")
#: Personalization of the hash that chooses a shard: hashes of other parts of hadelay differ from it, even of the same
#: text.
_PERSON = b"hadelay shard"

Index = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
Group = Annotated[int, Meta(ge=0, lt=256)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    #: Number of the shard's Raft group: the first byte of the ids and leases that the shard issues.
    group: Group
    #: Numbers that the shard had before restores; ids and leases with these numbers are still the shard's.
    former: Annotated[tuple[Group, ...], Meta(max_length=MAX_FORMER)] = ()
    #: Base URLs of the HTTP APIs of the shard's nodes, by name of the node.
    nodes: Annotated[dict[str, str], Meta(max_length=MAX_NODES)] = {}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rule of a shard map: the owner of the names that a pattern matches."""

    #: Pattern of topic names; `*` stands for any text, also for none.
    pattern: str
    #: Shards that share the names of the pattern.
    shards: Annotated[tuple[Index, ...], Meta(min_length=1, max_length=MAX_SHARDS)]
    #: Part of a name that chooses among the shards. name: the whole name, hashed. prefix: the part up to the first
    #: ".", hashed: `invoices` and `invoices.failed` stay together. number: the number at the end of the name, modulo
    #: the number of shards; a name without a number at its end is hashed.
    key: Literal["name", "prefix", "number"] = "name"

    def owner(self, name: str) -> int:
        if len(self.shards) == 1:
            return self.shards[0]
        if self.key == "number" and (number := _TRAILING.search(name)):
            return self.shards[int(number[0]) % len(self.shards)]
        key = name.partition(".")[0] if self.key == "prefix" else name
        return max(self.shards, key=lambda shard: (_hash(key, shard), shard))


def _hash(key: str, shard: int) -> bytes:
    # A CRC would not do: it is linear, and gave the largest of 16 shards 1.78 times its part of the names.
    return blake2b(b"%d %s" % (shard, key.encode()), digest_size=8, person=_PERSON).digest()


class ShardMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Shard map. Decoding checks only types and limits; `problem` says whether the parts fit together."""

    #: Version of the map, which only rises.
    version: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    shards: Annotated[dict[Index, Shard], Meta(min_length=1, max_length=MAX_SHARDS)]
    #: The first rule whose pattern matches a name gives the name's owner.
    rules: Annotated[tuple[Rule, ...], Meta(min_length=1, max_length=MAX_RULES)]
    #: Name of a topic → owner, whatever the rules say.
    pinned: Annotated[dict[str, Index], Meta(max_length=MAX_PINNED)] = {}

    def owner(self, name: str) -> int:
        """The shard that owns the topic of this name. A subscription has the owner of its topic."""
        topic = name.partition(SEPARATOR)[0]
        pinned = self.pinned.get(topic)
        return self._ruled(topic) if pinned is None else pinned

    def _ruled(self, topic: str) -> int:
        return next((rule.owner(topic) for rule in self.rules if covers(rule.pattern, topic)), self.rules[-1].shards[0])

    def reach(self, pattern: str) -> set[int]:
        """Shards that may own topics or subscriptions that a pattern matches; only the text before its first `*`
        counts."""
        begin, star, _ = pattern.partition("*")
        topic, subscription, _ = begin.partition(SEPARATOR)
        if not star or subscription:
            return {self.owner(topic)}
        found = {index for name, index in self.pinned.items() if name.startswith(topic)}
        for rule in self.rules:
            own, rest, more = rule.pattern.partition("*")
            if not (own.startswith(topic) or (rest and topic.startswith(own))):
                continue
            # All names that begin with `topic` have the same prefix (the part up to the first dot), so one shard owns
            # all of them.
            alike = rule.key == "prefix" and "." in topic
            found.update({rule.owner(topic)} if alike else rule.shards)
            if rest and not more and topic.startswith(own):
                break  # the rule matches all names of the pattern: no later rule decides
        return found

    def index_of(self, group: int) -> int | None:
        """The shard whose Raft group has this number now; None: no shard of the map."""
        return next((index for index, shard in self.shards.items() if shard.group == group), None)

    def issuer(self, group: int) -> int | None:
        """The shard that issued ids and leases with this group number, the present number or a former one."""
        return self._issuers.get(group)

    @cached_property
    def _issuers(self) -> dict[int, int]:
        return {number: index for index, shard in self.shards.items() for number in (*shard.former, shard.group)}

    def problem(self) -> str:
        """Describe what is wrong with the map; "" for a valid map."""
        return next(self._problems(), "")

    def mixed(self) -> str:
        """Explain why nodes of this map could not reach one another by the schemes of their addresses; "" if they
        could."""
        urls = sorted(f"shard {n}: {url}" for n, shard in self.shards.items() for url in shard.nodes.values())
        plain = next((url for url in urls if "http://" in url), "")
        encrypted = next((url for url in urls if "https://" in url), "")
        if not plain or not encrypted:
            return ""
        return (
            f"shards: some addresses are not encrypted ({plain}), and others are ({encrypted}): nodes with HTTPS send "
            "no request to others. Give all nodes https:// addresses, or none"
        )

    def _problems(self) -> Iterator[str]:
        numbers = Counter(number for shard in self.shards.values() for number in (shard.group, *shard.former))
        for number, count in numbers.items():
            if count > 1:
                yield f"shards: the group number {number} is listed {count} times; each number belongs to one shard"
        for index, shard in self.shards.items():
            for node, url in shard.nodes.items():
                if not 0 < len(node.encode()) <= MAX_NODE_NAME:
                    yield f"shards: {index}: the name of a node has 1 to {MAX_NODE_NAME} bytes, not {node[:80]!r}"
                if len(url) > MAX_URL or not _URL.fullmatch(url):
                    yield f"shards: {index}: {node}: {url[:80]!r} is no URL of a node, such as https://n1.example:7000"
        for rule in self.rules:
            if not _PATTERN.fullmatch(rule.pattern):
                yield f"rules: {rule.pattern[:150]!r} is no pattern: 1 to 128 of A-Z a-z 0-9 . _ - and *"
            if len(set(rule.shards)) < len(rule.shards):
                yield f"rules: {rule.pattern}: a shard is listed twice"
            if unknown := [index for index in rule.shards if index not in self.shards]:
                yield f"rules: {rule.pattern}: the map has no shard {unknown[0]}"
        if self.rules[-1].pattern != ALL:
            yield f"rules: the last rule must have the pattern {ALL}, so that each name has an owner"
        for name, index in self.pinned.items():
            if not TOPIC_NAME.fullmatch(name):
                yield f"pinned: {name[:150]!r} is no name of a topic"
            if index not in self.shards:
                yield f"pinned: {name}: the map has no shard {index}"


def job_of(text: str) -> tuple[int, int]:
    """Split a job's number, as users see it, into (shard, number in that shard); (0, 0), which no job has, for other
    text."""
    return divmod(int(text), JOBS) if text.isascii() and text.isdigit() and len(text) <= _JOB_DIGITS else (0, 0)


class Shards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shard maps that one shard knows. A change replaces the object."""

    current: ShardMap | None = None
    #: Map of a change that is under way: the shard creates only topics that it owns under both maps.
    prepared: ShardMap | None = None
    #: Prepared maps that later ones replaced since the current map: another shard may have one of them in force, so
    #: they go on to restrict what this shard creates.
    replaced: Annotated[tuple[ShardMap, ...], Meta(max_length=MAX_REPLACED)] = ()
    #: The shard was restored from a backup, or started from one survivor, and got no map since: other shards may have
    #: topics that its maps give to it. The shard creates no topic.
    suspended: bool = False

    def index_of(self, group: int) -> int | None:
        """The shard of the current map whose Raft group has this number; None: no map, or no such shard."""
        return None if self.current is None else self.current.index_of(group)

    def may_create(self, group: int, name: str) -> bool:
        """Whether the shard whose Raft group has this number may create a topic of this name."""
        if self.current is None:
            # A cluster that is about to join other shards has only a prepared map: it creates no topic until it has
            # joined.
            return self.prepared is None and not self.suspended
        if self.suspended or len(self.replaced) == MAX_REPLACED:
            return False
        return all(one.owner(name) == one.index_of(group) for one in self.maps())

    def maps(self) -> list[ShardMap]:
        """All maps that restrict which topics the shard creates."""
        return [one for one in (self.current, *self.replaced, self.prepared) if one is not None]

    def preparing(self, new: ShardMap) -> "Shards":
        """These maps with `new` as the prepared map. The prepared map so far is added to `replaced`, unless a known map
        has the same rules and pins."""
        replaced = self.replaced
        if self.prepared is not None and self.current is not None:
            known = [(one.rules, one.pinned) for one in (self.current, *replaced, new)]
            if (self.prepared.rules, self.prepared.pinned) not in known:
                replaced = (*replaced, self.prepared)[:MAX_REPLACED]
        return Shards(self.current, new, replaced, self.suspended)


#: A cluster without a shard map, which owns all names.
ALONE = Shards()
