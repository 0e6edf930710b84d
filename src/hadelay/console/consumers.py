"""The page Consumers: the consumers of all topics."""

from collections.abc import Callable
from functools import partial

from hadelay.api.consumers import ConsumerOfTopics
from hadelay.console.visit import Pages, Visit, whole
from hadelay.console.zones import millis
from hadelay.http.answers import Answer

pages = Pages()

#: Number of consumers on a page.
_PAGE = 100
#: Time without a receive, in ms, after which the page shows a consumer as silent.
_SILENT_MS = 300_000


@pages.get("/console/consumers")
async def overview(visit: Visit) -> Answer:
    """Consumers of all topics that the visitor may read; the query may filter by a part of their names."""
    found = await visit.service.consumers.list_consumers(may=partial(visit.may, "read"), stale=visit.stale)
    text = visit.query.get("q", "").strip()[:128]
    part, now_ms = text.lower(), visit.service.access.now_ms()
    named = [one for one in found.consumers if part in one.name.lower() or any(part in of.lower() for of in one.topics)]
    kinds = _kinds(now_ms)
    show = visit.query.get("show", "")
    shown = [one for one in named if show not in kinds or kinds[show](one)]
    page = whole(visit.query.get("page", "1"), 3) or 1
    return visit.page(
        "consumers.html",
        active="consumers",
        title="Consumers",
        consumers=shown[(page - 1) * _PAGE : page * _PAGE],
        total=len(shown),
        before=(page - 1) * _PAGE,
        pages=-(-len(shown) // _PAGE),
        number=page,
        choices=[(name, sum(map(chosen, named))) for name, chosen in kinds.items()],
        show=show if show in kinds else "",
        complete=found.complete,
        q=text,
        now_ms=now_ms,
    )


def _kinds(now_ms: int) -> dict[str, Callable[[ConsumerOfTopics[str]], bool]]:
    """Filter of the page → function that tells whether a consumer passes the filter."""

    def silent(one: ConsumerOfTopics[str]) -> bool:
        return not one.waiting and (one.asked_at is None or now_ms - millis(one.asked_at) > _SILENT_MS)

    return {
        "failing": lambda one: one.failed is not None,
        "with leases": lambda one: one.leased > 0,
        "not asking": silent,
    }
