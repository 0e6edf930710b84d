"""Importers: copy the delayed jobs of other systems into the cluster (docs/howto/move-in.md)."""
