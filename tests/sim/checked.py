"""Names of the promises that the simulator checks."""

#: Every promise, or branch of one, under the name that violations have; "checked …" is how often it was decided on.
CHECKED = (
    "I1 lost", "I2 conservation", "I3 phantom", "I3 phantom, body", "I3 phantom, tags", "I3 phantom, cancelled",
    "I3 phantom, purged", "I3 phantom, refused", "I5 resurrection", "I5 resurrection, dead",
    "I6 double lease, attempts", "I6 double lease, overlap", "I6 double lease, true time", "I6 double lease, interval",
    "I8 duplicate, told",
    "I8 duplicate, handed out", "I9 early, cluster time", "I9 early, delay", "I9 early, time of day", "I9 early, clock",
    "I10 late", "I12 divergence, entries", "I12 divergence, results", "I12 divergence, replicas",
    "I13 log safety, leaders", "I13 log safety, votes", "I13 log safety, vote on disk", "I13 log safety, term",
    "I13 log safety, commit index back", "I13 log safety, commit index ahead", "I13 log safety, members",
    "I13 log safety, applied entry", "I13 log safety, term on disk", "campaigns, pre-votes",
    "I14 durability, compacted",
    "I14 durability, majority", "I14 durability, restart", "I14 durability, applied", "I15 liveness",
    "I16 fenced leader, grant", "I16 fenced leader, interval", "I17 fail-stop, own error", "I17 fail-stop, failed sync",
    "I18 metrics honesty", "I18 metrics honesty, waiting", "attempts", "TTL, leased", "TTL, ended", "TTL, written",
    "max_wait", "one per key", "filters", "stale read", "reads", "forgotten", "campaigns",
    "what leaders count", "results", "hang-ups", "webhooks, one at a time", "webhooks, Retry-After", "backup",
    "G1 groups", "G2 groups apart", "G3 groups in order", "G4 groups released", "G5 groups in pace",
    "J1 jobs, twice", "J1 jobs, counts",
    "F1 fan-out, copies", "F1 fan-out, hand-outs", "C1 callbacks",
    "S1 schedules", "S1 schedules, triggers", "S2 schedules, wait",
    "U1 unique, stored", "U1 unique, dropped",
    "S2 schedules, counts", "S2 schedules, catch-up", "S2 schedules, overlap",
    "S4 schedules, cancelled", "S4 schedules, version", "S5 schedules, overdue", "J2 jobs, complete",
    "I12 divergence, states", "I2 conservation, log since checkpoint", "what leaders count, majority", "quotas",
    "alerts", "reads, listed", "reads, counted", "reads, described", "reads, quorum",
)  # fmt: skip
