"""The version of the package, and the feature levels of the replicated log (docs/howto/upgrade.md)."""

VERSION = "0.1.0"

#: Highest feature level this code knows; switched on by a replicated command once every node has it.
FEATURE_LEVEL = 3
#: From this level on a redrive leaves dead whose client key another message has, and commands that name their messages
#: are bounded (ADR 160), as are purges; a webhook's header may be PUT as GET shows it (ADR 162), and its URL is judged
#: alike by all versions of Python; an ack from before a message died no longer ends it once it is back; and what was
#: due when it was rescheduled is marked.
ONE_PER_KEY = BOUNDED = MASKED_HEADERS = PLAIN_URLS = ACK_OF_THIS_LIFE = MARKS_WAS_DUE = 2
#: Level that brought the members of the cluster into the log (ADR 150).
MEMBERS_LEVEL = 2
#: From this level on a topic that is made has the defaults of this level (ADR 205), retries of a webhook keep a least
#: distance, and a settlement says how long its hand-out took (SETTLE, ADR 206).
RETRY_DEFAULTS = WEBHOOK_FLOOR = SETTLE_LEVEL = 3
#: From this level on a NACK may give a message back without counting the attempt (ADR 209).
UNCOUNTED = 3
#: From this level on a masked header of a webhook is dropped where the URL leads to another origin (ADR 162).
MASKED_OF_ORIGIN = 3
#: Level of a new cluster, whatever its first nodes support: their versions may differ.
FIRST_LEVEL = 1
