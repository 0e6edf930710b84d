"""What raft/library.py relies on in PySyncObj: every private name that it touches is there, in the shape it counts on,
and the library really calls what is overridden. An upgrade that moves one fails here."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.journal import Journal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from hadelay.raft import library
from tests.raft.rig import Cluster

SOURCE = Path(library.__file__)
#: Attributes of the library's node, with their types.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "_SyncObj__otherNodes": set,
    "_SyncObj__raftCommitIndex": int,
    "_SyncObj__raftElectionDeadline": float,
    "_SyncObj__raftLastApplied": int,
    "_SyncObj__raftLeader": (Node, type(None)),
    "_SyncObj__raftLog": Journal,
    "_SyncObj__raftMatchIndex": dict,
    "_SyncObj__raftNextIndex": dict,
    "_SyncObj__lastResponseTime": dict,
    "_SyncObj__transport": Transport,
}
#: Its methods that are called, or overridden, with their parameters.
METHODS = {
    "_SyncObj__applyLogEntries": [],
    "_SyncObj__sendAppendEntries": [],
    "_SyncObj__setCurrentTerm": ["term", "votedForNodeId"],
    "_SyncObj__setState": ["newState"],
    "_applyCommand": ["command", "callback", "commandType"],
    "_checkCommandsToApply": [],
    "_getLeader": [],
    "_onTick": ["timeToWait"],
}
#: Methods of its transport, through which the library hears.
TRANSPORT = {
    "_onMessageReceived": ["node", "message"],
    "_onNodeConnected": ["node"],
    "_onNodeDisconnected": ["node"],
}
#: Of library.py itself.
OURS = {"_committed", "_journal", "_listener", "_receive", "_state_changed", "_to_library"}
#: Names of the library's module that are replaced while it constructs itself, and how it calls them.
SEAMS = {"createJournal": "self.__conf.journalFile", "createPoller": "self.__conf.pollerType", "PipeNotifier": ""}


class Silent(Transport):  # type: ignore[misc]
    def send(self, node: Node, message: Any) -> bool:
        return True

    def destroy(self) -> None: ...


@pytest.fixture
def plain() -> SyncObj:
    """The library's own node, with nothing of ours."""
    conf = SyncObjConf(autoTick=False)
    return SyncObj(Node("n1"), [Node("n2"), Node("n3")], conf, transport=Silent(None, None, None))


def test_the_version_is_the_one_that_was_read() -> None:
    assert version("pysyncobj") == "0.3.17"


def test_these_are_all_the_private_names_that_are_touched() -> None:
    tree = ast.parse(SOURCE.read_text())
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    touched |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "__" in node.name[2:-2]}
    private = {name for name in touched if name.startswith("_") and not name.endswith("__")}
    assert private - OURS == FIELDS.keys() | METHODS.keys() | TRANSPORT.keys()


def test_the_fields_are_there(plain: SyncObj) -> None:
    for name, kind in FIELDS.items():
        assert isinstance(vars(plain)[name], kind), name
    assert isinstance(type(plain).raftCurrentTerm, property)
    assert plain.raftCurrentTerm == 0
    assert vars(plain)["_SyncObj__otherNodes"] == {Node("n2"), Node("n3")}


@pytest.mark.parametrize(("owner", "methods"), [(SyncObj, METHODS), (Transport, TRANSPORT)])
def test_the_methods_are_there(owner: type, methods: dict[str, list[str]]) -> None:
    for name, parameters in methods.items():
        assert list(inspect.signature(vars(owner)[name]).parameters) == ["self", *parameters], name


def test_the_seams_of_its_module_are_used(plain: SyncObj) -> None:
    text = inspect.getsource(SyncObj.__init__)
    for name, argument in SEAMS.items():
        assert callable(getattr(syncobj, name))
        assert f"{name}({argument}" in text, name
    with library._seams(None):  # type: ignore[arg-type]
        assert syncobj.createPoller is library._Idle
    assert syncobj.createPoller is not library._Idle
    assert syncobj.monotonicTime() >= 0
    assert syncobj.PIPE_NOTIFIER_ENABLED  # otherwise a proposal notifies nobody, and nothing of ours is in its place


def test_numbers_and_texts_mean_what_they_did() -> None:
    states = syncobj._RAFT_STATE
    assert (states.FOLLOWER, states.LEADER) == (library._FOLLOWER, library._LEADER)
    assert bytes((syncobj._COMMAND_TYPE.NO_OP,)) == library.NO_OP
    text = inspect.getsource(SyncObj)
    for kind in ("request_vote", "response_vote", "append_entries", "next_node_idx"):
        assert f"'type': '{kind}'" in text, kind
        assert f"message['type'] == '{kind}'" in text, kind


def test_every_option_that_is_set_is_one() -> None:
    """SyncObjConf passes over names that it does not know."""
    cluster = Cluster(count=1)
    conf = vars(cluster.leader().core)["_SyncObj__conf"]
    (call,) = (
        node
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "SyncObjConf"
    )
    known = vars(SyncObjConf())
    options = [keyword.arg for keyword in call.keywords]
    assert set(options) <= known.keys()
    for name in options:
        # Set to something else than its default, or the test would not notice that it is passed over.
        assert getattr(conf, str(name)) != known[str(name)], name
    assert not conf.dynamicMembershipChange
    assert conf.journalFile is conf.fullDumpFile is None


#: The library never gets as far as these, which is what they are there for.
NEVER = {"deleteEntriesFrom", "deleteEntriesTo", "clear", "_destroy", "destroy"}


def test_overridden_methods_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: Counter[str] = Counter()
    expected: set[str] = set()

    def count(owner: type, name: str) -> None:
        inner = vars(owner)[name]

        def counting(*args: Any, **kwargs: Any) -> Any:
            called[f"{owner.__name__}.{name}"] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)
        expected.add(f"{owner.__name__}.{name}")

    for owner in (library._Log, library._Transport, library._Idle, library._Member):
        for name, value in list(vars(owner).items()):
            if inspect.isfunction(value) and name not in NEVER and name != "__init__":
                count(owner, name)
    for name in ("_SyncObj__sendAppendEntries", "_SyncObj__applyLogEntries", "_state_changed"):
        count(library.Core, name)

    def never(*_: Any) -> Any:
        raise AssertionError("the library's own way was taken")

    for name in ("sendAppendEntries", "applyLogEntries", "doApplyCommand", "loadDumpFile"):
        monkeypatch.setattr(SyncObj, f"_SyncObj__{name}", never)

    cluster = Cluster()
    cluster.commit(b"one", b"two")
    cluster.kill(cluster.leader().name)
    cluster.commit(b"three")
    cluster.settle()
    assert expected - called.keys() == set()


def test_every_method_of_a_journal_is_ours() -> None:
    """A new one would be the library's, and raise NotImplementedError in the middle of something."""
    abstract = {name for name, value in vars(Journal).items() if inspect.isfunction(value)}
    assert abstract - vars(library._Log).keys() == {"onOneSecondTimer"}
    assert Journal.onOneSecondTimer(None) is None


def test_votes_are_requested_in_one_order_in_every_process() -> None:
    for node in Cluster(5).nodes.values():
        others = [name for name in ("n1", "n2", "n3", "n4", "n5") if name != node.name]
        assert [member.id for member in vars(node.core)["_SyncObj__otherNodes"]] == others


def test_a_member_is_one_object() -> None:
    members = library._Members()
    assert members["n1"] is members["n1"]
    assert len({members["n1"], members["n2"], members["n1"]}) == 2
