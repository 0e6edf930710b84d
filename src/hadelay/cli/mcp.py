"""`hadelay mcp`: wake-ups for agents, over the Model Context Protocol (docs/howto/mcp.md)."""

from hadelay.cli.output import Remote
from hadelay.errors import ConfigError


def mcp(*, topic: str = "wakeups", remote: Remote = Remote()) -> None:
    """Serve an agent on standard input and output, until the input ends: tools to schedule wake-ups, to list, explain,
    reschedule and cancel them, and to receive them once they are due.

    Args:
        topic: Topic of the agent's wake-ups; the tools see no other topic. A token needs publish, consume and read for
            the topic.
    """
    try:
        from hadelay.mcp import server
    except ImportError as error:
        raise ConfigError(str(error)) from None
    server(remote.addresses(), remote.token or None, topic).run("stdio")
