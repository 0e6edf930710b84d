"""Push: the leader delivers topics with a webhook by HTTP POST, under the same leases as those that are pulled.

pool (who is called, how many at once) → sender (one call) → reports (the outcome, as ack or nack).
signing, headers: what a call carries. guard: where it may go. alerts: calls about messages that died.
"""
