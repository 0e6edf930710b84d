"""Webhooks: the leader delivers topics with a webhook by HTTP POST, under the same leases as for consumers that pull.

pool (which messages, how many calls at once) → sender (one call) → queues (the outcome as ack or nack). calls: what a
call carries. alerts: calls about dead letters.
"""
