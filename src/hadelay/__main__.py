"""`python -m hadelay` and the `hadelay` command."""

import sys


def main() -> None:
    # Print the version without importing the rest of hadelay: scripts ask for it often, and imports are slow.
    if sys.argv[1:] == ["--version"]:
        from hadelay.version import VERSION

        print(VERSION)
        return
    from hadelay.cli.app import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
