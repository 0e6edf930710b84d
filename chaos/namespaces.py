"""Network for one run: each node has its own network namespace, and clients use a bridge in another namespace. The
machine's own network stays untouched. Faults can cut the traffic between nodes while clients still reach every node."""

import contextlib
import os

from chaos import tools
from chaos.scenario import Mistake

_TABLE = """
table ip chaos {
  set from { type ipv4_addr; }
  set to { type ipv4_addr; }
  chain in { type filter hook input priority -300; policy accept; ip saddr @from drop; }
  chain loss { type filter hook input priority -299; policy accept; }
  chain out { type filter hook output priority -300; policy accept; ip daddr @to drop; }
}
"""


class Network:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._made: list[str] = []
        self._home = open(f"/proc/{os.getpid()}/ns/net")  # noqa: SIM115

    def address(self, name: str) -> str:
        return f"10.99.7.{self.names.index(name) + 1}"

    def space(self, name: str) -> str:
        return f"hdchaos.{os.getpid()}.{name}"

    def up(self) -> None:
        """Create the network, and move this process's main thread onto the bridge."""
        ip, bridge = tools.run, self.space("bridge")
        self._add(bridge)
        ip("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("ip", "-n", bridge, "addr", "add", "10.99.7.254/24", "dev", "br0")
        ip("ip", "-n", bridge, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            space = self.space(name)
            self._add(space)
            ip("ip", "-n", bridge, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("ip", "-n", bridge, "link", "set", f"v{i}", "master", "br0")
            ip("ip", "-n", bridge, "link", "set", f"v{i}", "up")
            ip("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("ip", "-n", space, "link", "set", "eth0", "up")
            if not tools.missing("nft"):
                ip("ip", "netns", "exec", space, "nft", "-f", "-", stdin=_TABLE)
        tools.enter_namespace(bridge)

    def _add(self, space: str) -> None:
        tools.run("ip", "netns", "add", space)
        self._made.append(space)
        tools.run("ip", "-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        tools.libc.setns(self._home.fileno(), 0)
        self._home.close()
        while self._made:
            with contextlib.suppress(Mistake):
                tools.run("ip", "netns", "del", self._made.pop())

    def cut(self, name: str, *, hears: bool = False, heard: bool = False) -> None:
        if not hears:
            self._nft(name, f"add element ip chaos from {{ {self._peers(name)} }}")
        if not heard:
            self._nft(name, f"add element ip chaos to {{ {self._peers(name)} }}")

    def uncut(self, name: str) -> None:
        self._nft(name, "flush set ip chaos from\nflush set ip chaos to")

    def lose(self, name: str, percent: int) -> None:
        rule = f"ip saddr {{ {self._peers(name)} }} numgen random mod 100 < {percent} drop"
        self._nft(name, f"add rule ip chaos loss {rule}")

    def reset(self, name: str) -> None:
        rule = f"ip saddr {{ {self._peers(name)} }} ip protocol tcp reject with tcp reset"
        self._nft(name, f"add rule ip chaos loss {rule}")

    def lose_nothing(self, name: str) -> None:
        self._nft(name, "flush chain ip chaos loss")

    def _peers(self, name: str) -> str:
        return ", ".join(self.address(other) for other in self.names if other != name)

    def _nft(self, name: str, text: str) -> None:
        tools.run("ip", "netns", "exec", self.space(name), "nft", "-f", "-", stdin=text + "\n")

    def shape(self, name: str, *discipline: object) -> None:
        tools.run("tc", "-n", self.space(name), "qdisc", "replace", "dev", "eth0", "root", *discipline)

    def unshape(self, name: str) -> None:
        tools.run("tc", "-n", self.space(name), "qdisc", "del", "dev", "eth0", "root")
