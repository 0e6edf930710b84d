"""An archived hour may be the only copy: no run replaces it by a worse one unless it is told to, nor removes a file
that it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hadelay.errors import Conflict
from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline import archive, reconcile
from hadelay.pipeline.hourfiles import Listing
from hadelay.pipeline.jobs import ArchiveOptions, JobSummary, ReconcileOptions
from hadelay.platform.disk import Disk
from hadelay.storage import manifests
from hadelay.storage.identity import Identity, write_identity
from hadelay.storage.manifests import Directory
from tests.ledger.world import World
from tests.pipeline.support import HOUR, MINUTE, message, options, write
from tests.pipeline.test_batches import NAME


def copy_of(directory: Path, *counts: int, cluster: str = "", body: bytes = b"body") -> Path:
    """Copy of a cluster with this number of settled messages in each hour, from hour 18 on. cluster: its id, unless the
    copy does not tell it."""
    world = World()
    for count in counts:
        world.ack(world.lease(*world.ids(*[message("t", world.now, body + b"%d" % n) for n in range(count)])))
        world.now += HOUR
    world.now += MINUTE
    write(world, directory)
    if cluster:
        write_identity(Disk(), str(directory), Identity(cluster, 0, "n1"))
    (directory / "as_of").write_text(str(options(world, directory).as_of))
    return directory


def run(source: Path, out: Path, *, force: bool = False, **more: Any) -> JobSummary:
    read = archive.Options(path=str(source), as_of=int((source / "as_of").read_text()), **more)
    return archive.run(None, ArchiveOptions(read, str(out), force=force))


def statuses(summary: JobSummary) -> list[str]:
    return [hour["status"] for hour in summary.hours]


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    """Archive of cluster `a` with 30 messages in hour 18."""
    out = tmp_path / "out"
    run(copy_of(tmp_path / "a", 30, cluster="a"), out)
    return out


def test_another_cluster_is_refused_and_nothing_is_written(archived: Path, tmp_path: Path) -> None:
    before = contents(archived)
    other = copy_of(tmp_path / "b", 40, 5, cluster="b", body=b"other")
    with pytest.raises(Conflict, match=r"archive of cluster 'a', and the source is of 'b': archive it into another"):
        run(other, archived)
    with pytest.raises(Conflict, match=r"of cluster 'a', and the source does not tell its cluster: copy .*identity"):
        run(copy_of(tmp_path / "unknown", 40, 5), archived)
    # The catalogue is lost: the manifests still tell the cluster.
    (catalogue,) = (archived / "_catalogue").iterdir()
    data = catalogue.read_bytes()
    catalogue.unlink()
    with pytest.raises(Conflict, match="of cluster 'a', and the source is of 'b'"):
        run(other, archived)
    catalogue.write_bytes(data)
    assert contents(archived) == before
    with pytest.raises(Conflict, match="is an archive of cluster 'a', and the source is of 'b'"):
        reconcile.run(None, ReconcileOptions(archive.Options(path=str(other), as_of=1), archive=str(archived)))


@pytest.mark.parametrize(
    ("count", "body", "said"),
    [
        (7, b"body", "the archive has 30 messages and 60 events of it, the source 7 and 14"),
        (40, b"Body", r"the first [\d,]+ bytes of \S+\.log differ from those that were archived"),
    ],
)
def test_a_source_that_does_not_extend_the_hour_is_refused_and_others_are_archived(
    count: int, body: bytes, said: str, archived: Path, tmp_path: Path
) -> None:
    before = contents(archived)
    worse = copy_of(tmp_path / "worse", count, 5, cluster="a", body=body)
    summary = run(worse, archived)
    assert (summary.failed, statuses(summary)) == (True, ["refused", "archived"])
    assert said.split("[")[0] in summary.hours[0]["detail"]
    after = contents(archived)
    assert {name: after[name] for name in before if not name.startswith("_catalogue")}.items() <= before.items()
    # Forced, the new hour is archived, and every byte of the old one is kept.
    forced = run(worse, archived, force=True)
    assert (forced.failed, statuses(forced)) == (False, ["archived", "unchanged"])
    assert "set aside in _aside/" in forced.hours[0]["detail"]
    assert sum(part.num_rows for part in map(pq.read_metadata, archived.glob(f"messages/hour={NAME}/*"))) == count
    (aside,) = (archived / "_aside").iterdir()
    kept = contents(aside)
    assert kept == {name: data for name, data in before.items() if NAME in name}


def test_an_hour_that_grew_replaces_its_beginning_and_only_its_files_are_removed(
    archived: Path, tmp_path: Path
) -> None:
    unknown = archived / f"messages/hour={NAME}/part-0000000000-9999999999.parquet"
    unknown.write_bytes(b"of nobody")
    summary = run(copy_of(tmp_path / "more", 30, cluster="a"), archived, split_rows=20)
    assert statuses(summary) == ["unchanged"]
    grown = copy_of(tmp_path / "grown", 30, cluster="a")
    # Events that the hour got later: what was archived is the beginning of what there is.
    world = World()
    ids = world.ids(*[message("t", 0, b"body%d" % n) for n in range(30)])
    world.ack(world.lease(*ids))
    ids = world.ids(message("t", 0, b"late"))
    world.ack(world.lease(*ids))
    world.now += 2 * HOUR
    write(world, grown)
    summary = run(grown, archived)
    assert (statuses(summary), summary.hours[0]["messages"]) == (["archived"], 31)
    assert [path.name for path in (archived / f"messages/hour={NAME}").iterdir()] == [
        "part-0000000000-0000000031.parquet"
    ]
    (kept,) = (archived / "_aside").rglob("*.parquet")
    assert kept.read_bytes() == b"of nobody"


def test_files_of_an_interrupted_run_are_known(tmp_path: Path) -> None:
    out, source = tmp_path / "out", copy_of(tmp_path / "a", 30, cluster="a")
    run(source, out)
    (out / "_manifest" / f"{NAME}.json").unlink()
    incomplete = out / f"messages/hour={NAME}/.part-0000000000-0000000030.parquet.0123456789ab"
    incomplete.write_bytes(b"PAR")
    before = {name for name in contents(out) if name.startswith(("messages", "events"))} - {
        str(incomplete.relative_to(out))
    }
    assert statuses(run(source, out)) == ["archived"]
    after = contents(out)
    assert {name for name in after if name.startswith(("messages", "events"))} == before
    assert not any(name.startswith("_aside") for name in after)
    # The catalogue knows what a lost manifest had.
    (out / "_manifest" / f"{NAME}.json").unlink()
    assert statuses(run(copy_of(tmp_path / "less", 7, cluster="a"), out)) == ["refused"]


def test_an_archive_that_does_not_tell_its_cluster_takes_that_of_a_source_which_extends_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(copy_of(tmp_path / "old", 30), out)
    files = Directory(str(out))
    assert manifests.load_catalogue(files).clusters == set()
    world = World()  # another cluster, whose checkpoint tells its id
    world.ack(world.lease(*world.ids(message("t", 0, b"other"))))
    world.now = 2 * HOUR
    given = options(world, write(world, tmp_path / "other", checkpoint=True))
    with pytest.raises(Conflict, match=rf"does not tell its cluster, and may be of another: hour {NAME}: the archive"):
        archive.run(None, ArchiveOptions(given, str(out)))
    assert statuses(run(copy_of(tmp_path / "same", 30, cluster="a"), out)) == ["unchanged"]
    assert manifests.load_catalogue(files).clusters == {"a"}
    (catalogue,) = (out / "_catalogue").iterdir()
    assert json.loads(catalogue.read_text())["cluster"] == "a"


def test_a_manifest_under_the_name_of_another_hour_is_not_counted_twice(archived: Path, tmp_path: Path) -> None:
    manifest, later = archived / "_manifest" / f"{NAME}.json", hour_name(hour_from_name(NAME) + 1)
    manifest.with_name(f"{later}.json").write_bytes(manifest.read_bytes())
    (manifest.with_name("1.json")).write_text("a foreign file")
    source = copy_of(tmp_path / "now", cluster="a")
    given = ReconcileOptions(archive.Options(path=str(source), as_of=1 << 41), archive=str(archived))
    with pytest.raises(Exception, match=rf"{later}\.json: no manifest .*and its file is named after hour {later}"):
        reconcile.run(None, given)
    assert Listing.decode(Listing([], 1, "a").encode()) == Listing([], 1, "a")
