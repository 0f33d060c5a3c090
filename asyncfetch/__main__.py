"""``python -m asyncfetch`` and the command ``asyncfetch``."""

from __future__ import annotations

import io
import sys

from asyncfetch.errors import AsyncFetchError


def main() -> None:
    """Run a command, and exit: with 2 and one line on stderr where an error of ours, or of the system, ends it."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: names of files may be of any characters
    try:
        from asyncfetch.cli.app import app

        app()
    except (AsyncFetchError, OSError) as error:
        print(f"asyncfetch: {error}", file=sys.stderr)  # noqa: T201  a command's output
        sys.exit(2)
    except KeyboardInterrupt:  # while it was imported; a command says so itself
        sys.exit(130)


if __name__ == "__main__":
    main()
