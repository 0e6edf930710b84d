"""A check that cannot fail is no check: every deliberate bug is noticed, by the check that is named for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chaos.sim import promises
from chaos.sim.cli import Options
from chaos.sim.mutations import MUTATIONS, SEEDS, broken
from chaos.sim.run import run_seed
from tests.handout.test_maintenance import test_the_retention_counts_from_the_last_settlement as retention
from tests.handout.test_topic_expiry import test_an_unused_topic_ends_and_a_polled_one_stays as polled_stays
from tests.ledger.test_ackresults import test_progress_lasts_as_long_as_its_lease as progress_lasts
from tests.ledger.test_groups_model import Run, drive
from tests.ledger.test_one_by_one import test_publish as one_by_one
from tests.ledger.test_subscriptions_model import test_random_commands as subscriptions
from tests.raft.test_cluster import test_a_log_with_another_entry_at_a_snapshots_end_does_not_stay as another_log
from tests.raft.test_cluster import (
    test_an_answer_to_a_heartbeat_from_before_a_read_does_not_confirm_it as old_heartbeat,
)
from tests.raft.test_library_faults import test_an_answer_to_an_earlier_term_does_not_count as old_answer
from tests.scale import LONG
from tests.sim.checked import CHECKED
from tests.sim.test_journal_torture import torture
from tests.sim.test_scenarios import test_a_node_with_an_empty_disk_gives_no_vote_that_could_lose_a_message as wiped
from tools import mutations as page

#: Where the table says that it shows. Where it no longer does, the others are looked through.
TABLE = page.read(page.PAGE.read_text())


def _played() -> list[str]:
    """One bug of each family of checks, such as "I9 early" or "reads"; the long suite plays all of them."""
    names = [name for name in MUTATIONS if name not in page.BY_HAND]
    if LONG:
        return names
    return list({MUTATIONS[name].caught_by[0].partition(",")[0]: name for name in reversed(names)}.values())


@pytest.mark.parametrize("name", _played())
def test_a_bug_is_noticed(name: str):
    found: list[str] = []
    first = [TABLE[name].seed] if name in TABLE else []
    mutation = MUTATIONS[name]
    for seed in dict.fromkeys((*first, *SEEDS)):
        report = Options(name).run(seed)
        if report.failure:
            found.append(f"seed {seed}: {report.failure}")
            if report.invariant in mutation.caught_by:
                return
    pytest.fail(f"no {mutation.caught_by} noticed that {mutation.what}; but: {found[:5]}")


def test_a_forgotten_vote_is_noticed():
    """It takes a crash between two votes of one term: rare in a cluster, common when the journal is tortured."""

    def lives() -> None:
        for seed in range(50):
            torture(seed)

    with broken("forgotten_vote"), pytest.raises(AssertionError, match="vote was forgotten"):
        lives()


def test_a_wiped_node_that_votes_is_noticed():
    with broken("wiped_node_votes"), pytest.raises(AssertionError):
        wiped()


def test_a_log_that_a_snapshot_does_not_replace_is_noticed():
    with broken("kept_log"), pytest.raises(AssertionError, match="its journal has one of term"):
        another_log()


def test_an_old_answer_that_counts_is_noticed():
    with broken("old_reply"), pytest.raises(AssertionError):
        old_answer()


@pytest.mark.parametrize("name", ["carried_unblocked", "purged_heads", "run_with_a_gap", "run_let_go"])
def test_a_group_that_waits_for_nobody_is_noticed(name: str):
    """It takes an hour that ends over blocked messages, or a purge of only ready or only scheduled ones."""

    def lives() -> None:
        for seed in range(30):
            drive(Run(seed), 120)

    with broken(name), pytest.raises(AssertionError):
        lives()


@pytest.mark.parametrize("name", ["acked_left_out", "moved_uncopied"])
def test_a_fill_that_leaves_messages_out_is_noticed(name: str):
    """It takes a message that is acked, or moved, between the steps of a fill."""

    def lives() -> None:
        for seed in range(25):
            subscriptions(seed)

    with broken(name), pytest.raises(AssertionError, match="the fill left messages out"):
        lives()


def test_progress_of_an_ended_lease_that_is_kept_is_noticed():
    """It takes a grant of two messages, one of which is settled after a report of its handler."""
    with broken("kept_progress"), pytest.raises(AssertionError, match="progress of a lease that ended"):
        progress_lasts()


def test_a_chain_that_begins_anew_is_noticed():
    """It takes two messages of one command that replace, one after the other, a message that has waited."""

    def lives() -> None:
        for seed in range(150):
            one_by_one(seed)

    with broken("new_chain"), pytest.raises(AssertionError):
        lives()


def test_an_hour_that_is_retired_too_early_is_noticed():
    """It takes an hour that is settled late, and a look at its messages within their retention."""
    with broken("early_retirement"), pytest.raises(AssertionError):
        retention()


def test_a_topic_that_ends_under_its_consumer_is_noticed():
    """It takes minutes without a message: too long for a run of the simulator."""
    with broken("polls_are_no_use"), pytest.raises(AssertionError):
        polled_stays()


def test_an_old_heartbeat_that_confirms_a_read_is_noticed():
    with broken("old_round"), pytest.raises(AssertionError):
        old_heartbeat()


def test_the_same_faults_break_nothing_in_the_program_itself():
    for name in ("no_sync", "dispatch_before_commit", "wiped_node_votes", "wall_clock_stamps"):
        assert not run_seed(1, MUTATIONS[name].families).failure


def test_the_published_table_is_that_of_the_mutations():
    """tools/mutations.py writes it; which seed it is may be out of date."""
    assert {name: row.what for name, row in TABLE.items()} == {name: m.what for name, m in MUTATIONS.items()}
    for name, row in TABLE.items():
        caught_by = MUTATIONS[name].caught_by
        assert row.noticed_by.startswith(caught_by) if name in page.BY_HAND else row.noticed_by in caught_by


def test_every_bug_names_the_branches_that_notice_it():
    """A bare prefix would let another branch of the promise notice the bug."""
    for name in MUTATIONS.keys() - page.BY_HAND.keys():
        assert set(MUTATIONS[name].caught_by) <= set(CHECKED), name


def test_every_branch_of_a_check_has_a_bug_that_it_alone_notices():
    alone = {mutation.caught_by[0] for mutation in MUTATIONS.values() if len(mutation.caught_by) == 1}
    # In interval mode, what an old leader hands out is within the bounds of its successor, which marks it; so no bug
    # shows in this branch alone. tests/sim/test_violations.py plants a violation.
    assert set(CHECKED) - alone == {"I16 fenced leader, interval"}


def test_every_violation_is_of_a_branch_that_is_counted():
    """A name that is not in CHECKED would be a check that nobody asks for a bug, or for something to decide on."""
    text = "".join(path.read_text() for path in Path(promises.__file__).parent.glob("*.py"))
    named = set(re.findall(r'(?:Violation|decide)\(\s*f?"([^"{]+)"', text)) - {"error"}
    assert named <= set(CHECKED)
