"""The version of the package, and the feature levels of the replicated log (docs/howto/upgrade.md)."""

VERSION = "0.1.0"

#: Highest feature level that this code knows. A replicated command switches the level on once every node knows it.
FEATURE_LEVEL = 5
#: From this feature level on: a redrive skips a dead letter while another message has its client key; purges and
#: commands that name their messages are bounded (ADR 160); a PUT may contain a webhook's header as GET shows it (ADR
#: 162); all Python versions accept the same webhook URLs; an ack sent before a message died does not end the message
#: after its redrive; and messages that were due when they were rescheduled are marked.
ONE_PER_KEY = BOUNDED = MASKED_HEADERS = PLAIN_URLS = ACK_OF_THIS_LIFE = MARKS_WAS_DUE = 2
#: Feature level from which the list of members is replicated in the log (ADR 150).
MEMBERS_LEVEL = 2
#: From this feature level on: new topics have the defaults of this level (ADR 205); a webhook's retries keep a minimum
#: wait; and a settlement includes the delay of its hand-out (SETTLE, ADR 206).
RETRY_DEFAULTS = WEBHOOK_FLOOR = SETTLE_LEVEL = 3
#: From this feature level on, a NACK may give a message back without counting the attempt (ADR 209).
UNCOUNTED = 3
#: From this feature level on, a masked header of a webhook is dropped if the URL changes to another origin (ADR 162).
MASKED_OF_ORIGIN = 3
#: Feature level from which schedules, message groups and bulk jobs exist, each with its own commands.
SCHEDULER_LEVEL = 4
#: Feature level from which a NACK may end a message at once as dead.
OUTCOMES_LEVEL = 5
#: Feature level from which topics have subscriptions (ADR 244).
SUBSCRIPTION_LEVEL = 5
#: Feature level from which webhooks have a method, and messages have header fields for their webhook calls.
CALLBACKS_LEVEL = 5
#: Feature level from which a publish may have a `unique_for` (ADR 254).
UNIQUE_LEVEL = 5
#: Feature level from which topics may have `expires_after` (ADR 257).
EXPIRY_LEVEL = 5
#: Feature level from which a SCHEDULE_PUT changes nothing if another node has put the same schedule.
SAME_PUT_LEVEL = 5
#: Feature level from which topics may have `group_rate` (ADR 81).
GROUP_RATE_LEVEL = 5
#: Feature level from which bulk jobs delete dead letters, and select messages by id and last error (ADR 211).
DEAD_JOBS_LEVEL = 5
#: Feature level from which the leader tells the other nodes through which node a consumer asks, and whether it waits.
CONSUMERS_LEVEL = 5
#: Feature level from which a new subscription may begin with the pending messages of its topic (ADR 229).
FILL_LEVEL = 5
#: Feature level of a new cluster, whatever its first nodes support: their versions may differ.
FIRST_LEVEL = 1
