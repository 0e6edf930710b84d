"""Fixtures with which Dramatiq's own tests run against a node."""
