"""The program `k3-verify`: imports its command under the guard of `base.program`."""

from __future__ import annotations

from typing import NoReturn

from k3.base.program import start


def main() -> NoReturn:
    """Run `k3-verify` and end the process."""
    start("k3.verify.cli")
