"""Names of Django's task framework: from Django 6 or, for Django 5.2, from the package django-tasks. `X as X` marks a
name as exported."""

import django

if django.VERSION >= (6, 0):
    from django.tasks import DEFAULT_TASK_QUEUE_NAME as DEFAULT_TASK_QUEUE_NAME
    from django.tasks import task as task
    from django.tasks import task_backends as task_backends
    from django.tasks.backends.base import BaseTaskBackend as BaseTaskBackend
    from django.tasks.base import Task as Task
    from django.tasks.base import TaskContext as TaskContext
    from django.tasks.base import TaskError as TaskError
    from django.tasks.base import TaskResult as TaskResult
    from django.tasks.base import TaskResultStatus as TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist as TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued as task_enqueued
    from django.tasks.signals import task_finished as task_finished
    from django.tasks.signals import task_started as task_started
    from django.utils.json import normalize_json as normalize_json
else:
    from django_tasks import DEFAULT_TASK_QUEUE_NAME as DEFAULT_TASK_QUEUE_NAME
    from django_tasks import task as task
    from django_tasks import task_backends as task_backends
    from django_tasks.backends.base import BaseTaskBackend as BaseTaskBackend
    from django_tasks.base import Task as Task
    from django_tasks.base import TaskContext as TaskContext
    from django_tasks.base import TaskError as TaskError
    from django_tasks.base import TaskResult as TaskResult
    from django_tasks.base import TaskResultStatus as TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist as TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued as task_enqueued
    from django_tasks.signals import task_finished as task_finished
    from django_tasks.signals import task_started as task_started
    from django_tasks.utils import normalize_json as normalize_json
