"""Contenders by name, in the order of the table."""

from __future__ import annotations

from pathlib import Path

from bench.delays.contender import Contender
from bench.delays.contenders import (
    beanstalkd,
    bullmq,
    celery_countdown,
    dramatiq_redis,
    hadelay_client,
    nats_nak,
    postgres_skip_locked,
    procrastinate_postgres,
    rabbitmq_ttl,
    redis_zset,
    rq_scheduled,
    sqs,
)
from bench.delays.plan import Plan

_ALL: tuple[type[Contender], ...] = (
    hadelay_client.HadelayClient,
    redis_zset.RedisAlways,
    redis_zset.RedisEverySecond,
    postgres_skip_locked.SkipLocked,
    beanstalkd.Beanstalkd,
    rabbitmq_ttl.RabbitMq,
    nats_nak.NatsNak,
    celery_countdown.CeleryRedis,
    celery_countdown.CeleryHadelay,
    dramatiq_redis.Dramatiq,
    rq_scheduled.Rq,
    bullmq.BullMq,
    procrastinate_postgres.Procrastinate,
    sqs.SqsMoto,
    sqs.SqsHadelay,
)
CONTENDERS: dict[str, type[Contender]] = {one.name: one for one in _ALL}


def contender_of(plan: Plan) -> Contender:
    return CONTENDERS[plan.contender](Path(plan.directory), plan.port, plan.visibility_s)
