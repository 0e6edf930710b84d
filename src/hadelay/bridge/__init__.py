"""Bridges: delays for a message broker that has none (docs/howto/from-rabbitmq.md)."""
