"""The command `nsa-sel`, also `python -m nsa_sel`."""

import sys

from nsa_sel.errors import NsaSelError, needs_extra


def main() -> None:
    """Run the command line; exit with a message if it lacks a package."""
    try:
        with needs_extra("cli", "nsa-sel"):
            from nsa_sel.cli.app import app
    except NsaSelError as error:
        sys.exit(f"error: {error}")
    try:
        app()
    except OSError as error:  # a full disk: commands name the files that they read and write themselves
        sys.exit(f"error: output can't be written: {error.strerror}")


if __name__ == "__main__":
    main()
