from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the pipeline is an extra, and pyarrow is not installed")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for all tests: starting it takes longer than all of them."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'hadelay[spark]'")
    from hadelay.pipeline.session import find_java, no_java, session

    if find_java() is None:
        pytest.skip(no_java())
    started = session(
        "local[2,3]", "1g",  # a task is tried three times
        **{
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.adaptive.enabled": "false",
            # To generate and compile Java for each query takes longer than these few rows.
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        },
    )  # fmt: skip
    yield started
    started.stop()
