"""The program `k3-run`: imports its command under the guard of `base.program`."""

from __future__ import annotations

from typing import NoReturn

from k3.base.program import start


def main() -> NoReturn:
    """Run `k3-run` and end the process."""
    start("k3.engine.cli")
