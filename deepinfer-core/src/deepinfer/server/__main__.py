"""``python -m deepinfer.server``: the same as ``deepinfer serve``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``deepinfer serve`` with this command line."""
    from deepinfer.__main__ import run

    sys.exit(run(["serve", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
