"""Checks URIs of remote storage, without importing pyarrow, which opens them."""

import re
from urllib.parse import parse_qsl, urlsplit

#: Schemes of URIs that pyarrow.fs opens.
SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
#: Query parameters refused in URIs: secrets would be visible in messages, process lists and Spark's event log.
_SECRETS = {"access_key", "secret_key", "session_token", "account_key", "sas_token", "tenant_secret"}
#: Schemes that pyarrow.fs does not open → the scheme that was probably meant.
_MEANT = {"s3a": "s3", "s3n": "s3", "wasb": "abfs", "wasbs": "abfss"}


def is_uri(where: str) -> bool:
    return "://" in where


def problem(where: str) -> str:
    """Error text if `where` is neither a path nor a URI that pyarrow.fs opens; "" if it is."""
    if not is_uri(where):
        found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", where)
        return f"{where}: a URI has two slashes, {found[1].lower()}://…" if found else ""
    try:
        parts = urlsplit(where)
    except ValueError as error:  # urlsplit raises ValueError for a bracket without its pair, for example
        return f"{where.partition('://')[0]}://…: not a URI: {error}"
    if parts.password or _SECRETS & {name for name, _ in parse_qsl(parts.query)}:
        return (
            f"{parts.scheme}://…{parts.path}: a URI must not contain secrets: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or what else the store's own tools read (~/.aws/credentials, the machine's role)"
        )
    scheme = where.partition("://")[0]
    if scheme not in SCHEMES:
        meant = _MEANT.get(scheme.lower(), scheme.lower())
        hint = f"write {meant}://…" if meant in SCHEMES else f"known are {', '.join(f'{s}://' for s in SCHEMES)}"
        return f"{where}: no filesystem is known for {scheme}://; {hint}"
    return ""
