"""Backend for Django's tasks on a cluster (docs/howto/django.md): the class for `BACKEND` in TASKS, and the command
`hadelay_worker`."""

try:
    from hadelay.django.backend import HadelayBackend as HadelayBackend
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("django", "django_tasks"):
        raise
    raise ImportError(f"hadelay.django needs {missing}: install hadelay[django]") from error
