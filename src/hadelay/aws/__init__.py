"""The AWS endpoints: HTTP APIs that AWS SDKs speak, so that a program in any language can use a cluster. The code calls
such an endpoint a door.

A leaf on top of `http` and the services of a node, as the console is: it has no privileges of its own, and nothing
imports it but `process`.
"""
