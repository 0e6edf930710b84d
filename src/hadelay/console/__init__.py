"""The console: pages for a browser at /console/, served by every node (docs/howto/console.md).

A leaf on top of `http` and the services of a node: it has no privileges of its own, and nothing imports it but
`process`.
"""
