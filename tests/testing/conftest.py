"""The plugin's fixture, also where hadelay was installed before it had the plugin."""

from hadelay.testing.plugin import hadelay

__all__ = ["hadelay"]
