"""What all tenants of a node share: no token takes all of it."""

import pytest

from hadelay.api.service import Actor
from hadelay.errors import LimitReached
from hadelay.rights import Rights
from hadelay.rules.access import UNRESTRICTED, RequestRights
from hadelay.rules.sharedcount import SharedCount


def rights(name: str, *scopes: str) -> RequestRights:
    return RequestRights(Actor("id", name), Rights(scopes))


def test_no_token_takes_all_waiting_receives() -> None:
    shared = SharedCount(40, "receives wait", "try later")
    taken = []

    def take(access: RequestRights) -> str:
        one = shared.one_more(access)
        try:
            one.__enter__()
        except LimitReached as error:
            return error.detail
        taken.append(one)
        return ""

    low = rights("low", "consume", "admin:a-*")
    assert [take(low) for _ in range(10)] == [""] * 10
    assert "the token 'low'" in take(low)
    assert "its share is 10 of 40; try later" in take(rights("low", "consume:b-*"))
    for n in range(26):
        assert take(rights(f"more{n % 3}", "consume")) == ""
    assert "kept for admin tokens" in take(rights("last", "consume"))
    assert [take(rights("root", "admin")) for _ in range(2)] == ["", ""]
    assert [take(UNRESTRICTED) for _ in range(3)][:2] == ["", ""]
    assert "too many receives wait on this node (40)" in take(rights("root", "admin"))
    for one in taken:
        one.__exit__(None, None, None)
    assert shared.count == 0
    assert take(low) == ""


def test_one_client_of_a_node_without_tokens_may_take_all() -> None:
    shared = SharedCount(8, "receives wait", "try later")
    taken = [shared.one_more(UNRESTRICTED) for _ in range(8)]
    for one in taken:
        one.__enter__()
    with pytest.raises(LimitReached), shared.one_more(UNRESTRICTED):
        pass
