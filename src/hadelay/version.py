"""The version of the package, and the feature levels of the replicated log (docs/howto/upgrade.md)."""

VERSION = "0.1.0"

#: Feature level of the first release, and of each new cluster: the versions of its first nodes may differ.
FIRST_LEVEL = 1
#: Highest feature level that this code knows. A replicated command switches the level on once every node knows it.
FEATURE_LEVEL = 1
#: Last commit whose code reads the files of development versions, which are older than the first release.
LAST_DEVELOPMENT = "5c412203"
