"""`mtpdeploy` and `python -m mtpdeploy`. Kept apart from the door, so that Ctrl-C while it is still being imported ends quietly too."""

from __future__ import annotations

import sys


def main() -> None:
    """Ends the process with the verb's exit code; 130 when interrupted."""
    try:
        from mtpdeploy.cli import main as click_door

        click_door()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
