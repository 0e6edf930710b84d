"""Celery on hadelay: a transport of kombu, a result backend, and a scheduler for `celery beat`.

Importing this module makes the URL schemes hadelay:// and hadelays:// known to Celery. docs/howto/celery.md explains
the use.
"""

try:
    import celery as _celery  # noqa: F401
except ImportError as error:
    raise ImportError("hadelay.celery needs Celery: pip install 'hadelay[celery]'") from error

from celery.app.backends import BACKEND_ALIASES
from kombu.transport import TRANSPORT_ALIASES

from hadelay.celery.beat import Scheduler as Scheduler
from hadelay.celery.results import Backend as Backend
from hadelay.celery.transport import Transport as Transport

for _scheme in ("hadelay", "hadelays"):
    TRANSPORT_ALIASES[_scheme] = "hadelay.celery:Transport"
    BACKEND_ALIASES[_scheme] = "hadelay.celery:Backend"
