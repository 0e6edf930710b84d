"""Import from RabbitMQ's delayed-message plugin, up to RabbitMQ 3.12: an Erlang expression prints its messages as lines
of JSON.

The messages get the bridge's envelope, so that a bridge publishes them back when they are due.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from hadelay.bridge.envelope import CONTENT_TYPE, Envelope, pack
from hadelay.client.putoptions import Put
from hadelay.importers.engine import Entry, Skipped

#: Expression for `rabbitmqctl eval`: prints one line of JSON per message in the plugin's table on one node, and changes
#: nothing. Its tuples and positions follow RabbitMQ's records delay_entry, exchange, delivery, basic_message and
#: content.
EXPRESSION = """
Line = fun({delay_entry, {delay_key, Due, Exchange}, Delivery, _}, Count) ->
  {resource, Vhost, exchange, Name} = element(2, Exchange),
  Found = case Delivery of
    {delivery, _, _, _, {basic_message, _, [Key | _], Content, _, _}, _, _} ->
      Encoded = rabbit_binary_generator:ensure_content_encoded(Content, rabbit_framing_amqp_0_9_1),
      Body = iolist_to_binary(lists:reverse(element(6, Encoded))),
      #{routing_key => Key, properties => base64:encode(element(4, Encoded)), body => base64:encode(Body)};
    _ -> #{}
  end,
  io:format("~s~n", [rabbit_json:encode(Found#{due => Due, vhost => Vhost, exchange => Name})]),
  Count + 1
end,
Tables = [T || T <- mnesia:system_info(tables), lists:prefix("rabbit_delayed_message", atom_to_list(T)),
  not lists:suffix("_index", atom_to_list(T))],
lists:foldl(fun(T, Count) -> ets:foldl(Line, Count, T) end, 0, Tables).
"""


class _Line(msgspec.Struct):
    due: int
    vhost: str
    exchange: str
    routing_key: str | None = None
    #: AMQP properties (encoded flags and values), and body; both are base64 in the line.
    properties: bytes = b""
    body: bytes = b""


def delayed(lines: Iterable[bytes], topic: str, exchange: str | None, vhost: str) -> Iterator[Entry | Skipped]:
    """Read the printed messages of a vhost: those of one exchange, or of all (None). Raises ValueError for a line that
    the expression did not print, and for a list that was cut: the number of its messages is missing at its end."""
    seen = Counter[str]()
    count: int | None = None
    for text in lines:
        if text.strip().isdigit():
            if int(text) != (count or 0):
                break
            count = 0  # begin to count anew: the list of another node may follow
            continue
        if not text.strip():
            continue
        count = (count or 0) + 1
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"a line is not of `hadelay import rabbitmq-delayed --expression`: {error}") from None
        # Number messages with equal content and due time, so that their ids differ.
        digest = hashlib.sha256(text.strip()).hexdigest()
        seen[digest] += 1
        id = f"{digest[:40]}.{seen[digest]}"
        if line.vhost != vhost or exchange not in (None, line.exchange):
            yield Skipped(id, f"it is of exchange {line.exchange!r} in vhost {line.vhost!r}")
        elif line.routing_key is None:
            yield Skipped(id, "this version of RabbitMQ keeps messages in another form")
        else:
            try:
                envelope = Envelope(line.exchange, line.routing_key, _properties(line.properties), line.body)
                put = Put(topic=topic, body=pack(envelope), content_type=CONTENT_TYPE, at=line.due)
            except (ValueError, TypeError, OverflowError, OSError, RecursionError):
                yield Skipped(id, "its properties cannot be read")
            else:
                yield Entry(id, put)
    if count != 0:
        raise ValueError("the list is cut: the number of its messages is missing at its end. List them again")


def _properties(encoded: bytes) -> dict[str, Any]:
    from pamqp.commands import Basic

    found = Basic.Properties()
    found.unmarshal(int.from_bytes(encoded[:2], "big"), encoded[2:])
    given = {name: getattr(found, name, None) for name in Basic.Properties.flags}
    return {name: value for name, value in given.items() if value is not None and value != ""}
