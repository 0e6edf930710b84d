"""Publishing for programs that relay messages of others: one refused message must not hold up the rest."""

import math
import time

from hadelay.client.putoptions import Put
from hadelay.client.sync import Client
from hadelay.client.types import PutResult
from hadelay.errors import HadelayError, Unauthorized


def put_apart(client: Client, puts: list[Put], within_s: float = math.inf) -> list[PutResult]:
    """Publish the messages in one request. If the nodes refuse the whole request, for example for its size, publish the
    messages one by one. No publish begins after `within_s` seconds: the results of the last messages are missing
    then."""
    try:
        return list(client.put_many(puts)) if puts else []
    except HadelayError as error:
        if error.retryable or not error.outcome_known or not error.of_a_node or isinstance(error, Unauthorized):
            raise
        if len(puts) == 1:
            return [error]
    results, until = list[PutResult](), time.monotonic() + within_s
    while len(results) < len(puts) and time.monotonic() < until:
        results += put_apart(client, [puts[len(results)]])
    return results
