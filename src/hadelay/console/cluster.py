"""The page Cluster: members, past leaders, this node's checks and files; transfer, drain, add, remove, replace."""

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from hadelay.console.alarms import alarms
from hadelay.console.overview import values_of
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit
from hadelay.errors import Conflict, NotFound
from hadelay.http.answers import Answer
from hadelay.server.service.overview import HourRow

pages = Pages()

#: Limit of hours whose files the page shows, and limit of terms that it shows.
_HOURS, _TERMS = 240, 8
#: Name of a check of /readyz → label on the page.
_CHECKS = {
    "leader": "Leader", "clock": "Clock", "applied": "Log", "admitted": "Vote", "space": "Disk", "drained": "Drained",
}  # fmt: skip
#: Parts of the page that a stream keeps up to date.
_LIVE = ("alarms", "members", "checks", "terms", "backups")


@pages.get("/console/cluster")
async def show(visit: Visit) -> Answer:
    visit.need("read")
    hours, archive = await visit.service.overview.hours()
    running = next((n for n, hour in enumerate(hours) if not hour.sealed), len(hours))
    first = max(0, min(running - _HOURS // 2, len(hours) - _HOURS))
    certificates = [
        (one.paths["tls_cert"], f"{datetime.fromtimestamp(one.expires_s, UTC):%Y-%m-%d}", one.expires_s - time.time())
        for one in visit.call.context.metrics.certificates
    ]
    shown = [(hour, kind(hour)) for hour in hours[first : first + _HOURS]]
    values = {
        **await values_of(visit), **await _node(visit), "hours": shown, "all_hours": len(hours), "archive": archive,
        "counts": Counter(one for _, one in shown), "archived": sum(hour.archived for hour, _ in shown),
        "certificates": certificates,
    }  # fmt: skip
    return visit.page("cluster.html", active="cluster", title="Cluster", **values)


def kind(hour: HourRow) -> str:
    """Colour of an hour in the strip of hours. An archived hour that is mapped has the colour of mapped hours, because
    its messages are being handed out."""
    return "mapped" if hour.mapped else "archived" if hour.archived else "sealed" if hour.sealed else "future"


async def _node(visit: Visit) -> dict[str, Any]:
    overview = visit.service.overview
    return {
        "checks": visit.service.cluster.readyz(),
        "checkpoint_s": overview.checkpoint_age_s,
        "most_terms": _TERMS,
        "check_names": _CHECKS,
        "alarms": alarms(await visit.site.report(visit), ("cluster", "node")),
    }


@pages.live("/console/live/cluster")
def live(visit: Visit) -> tuple[str, Any]:
    visit.need("read")

    async def frame() -> dict[str, Any]:
        values = {**await values_of(visit), **await _node(visit)}
        return {"html": {part: visit.render(f"{part}.html", values) for part in _LIVE}}

    return "cluster", frame


@pages.post("/console/cluster/transfer")
async def transfer(visit: Visit) -> Answer:
    visit.need("admin")
    leader = await visit.service.cluster.transfer(visit.text("to") or None, visit.actor)
    return visit.go("/console/cluster", f"{leader} leads.")


@pages.post("/console/cluster/drain")
async def drain(visit: Visit) -> Answer:
    visit.need("admin")
    node, undo = visit.text("node"), visit.text("undo") == "yes"
    await visit.service.cluster.drain(node, undo, visit.actor)
    what = "takes part again" if undo else "is drained: it accepts no publishes and no receives, and stays a replica"
    return visit.go("/console/cluster", f"{node} {what}.")


@pages.post("/console/cluster/add")
async def add(visit: Visit) -> Answer:
    visit.need("admin")
    name, raft = visit.text("name"), visit.text("raft")
    await visit.service.cluster.add_member(name, raft, visit.actor)
    return visit.go("/console/cluster", f"{name} is added: it copies the data, and votes once it has caught up.")


@pages.post("/console/cluster/remove")
async def remove(visit: Visit) -> Answer:
    """Remove a member, after the person typed its name."""
    visit.need("admin")
    name = visit.text("node")
    if not name or visit.text("typed") != name:
        raise Wrong("typed", f"Type the name of the node, {name[:64]}, to confirm.")
    await visit.service.cluster.remove_member(name, visit.actor)
    return visit.go("/console/cluster", f"{name} is no member any more.")


@pages.post("/console/cluster/replace")
async def replace(visit: Visit) -> Answer:
    """Replace a member in two steps, each after the person typed the old member's name. The first step adds the new
    member; the second removes the old member, once the new member votes."""
    visit.need("admin")
    old, new, raft = visit.text("node"), visit.text("name"), visit.text("raft")
    if not old or visit.text("typed") != old:
        raise Wrong("typed", f"Type the name of the old node, {old[:64]}, to confirm.")
    members = {member.name: member for member in (await visit.service.cluster.view(stale=False)).members}
    if old not in members:
        raise NotFound(f"there is no node {old[:64]!r}; there are {', '.join(members)}")
    if new == old:
        raise Wrong("name", f"Give the new node another name than {old}.")
    if new not in members:
        await visit.service.cluster.add_member(new, raft, visit.actor)
        steps = f"When the table shows it as a follower, replace {old} by {new} once more: that removes {old}."
        return visit.go("/console/cluster", f"{new} is added, and copies the data. {steps}")
    if members[new].raft != raft:
        raise Conflict(f"{new[:64]} is a member already, at {members[new].raft}")
    if members[new].role not in ("leader", "follower"):
        raise Conflict(f"{new} does not vote yet: wait until the table shows it as a follower")
    await visit.service.cluster.remove_member(old, visit.actor)
    return visit.go("/console/cluster", f"{old} is replaced by {new}. Stop the process of {old}.")
