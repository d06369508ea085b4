"""The program `k3-repack`: imports its command under the guard of `base.program`."""

from __future__ import annotations

from typing import NoReturn

from k3.base.program import start


def main() -> NoReturn:
    """Run `k3-repack` and end the process."""
    start("k3.repack.cli")
