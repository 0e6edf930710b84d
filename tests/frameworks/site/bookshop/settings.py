import os

import django

SECRET_KEY = "for tests"
USE_TZ = True
DEBUG = False
INSTALLED_APPS = ["django.contrib.contenttypes", "hadelay.django"]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["OUT"] + ".sqlite"}}
TASKS = {
    "default": {
        "BACKEND": "hadelay.django.HadelayBackend",
        "QUEUES": ["default", "mail and more"],
        "OPTIONS": {"max_attempts": 3, "retry": {"builtins.ConnectionError": ["0.1s", "0.2s"]}},
    },
    "once": {"BACKEND": "hadelay.django.HadelayBackend", "OPTIONS": {"prefix": "once"}},
}
