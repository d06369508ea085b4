"""Hostile and broken snapshots: every one must be refused, by name, with the place and with advice.

`ATTACKS` is the whole list; `base(directory)` writes the sound snapshot that they break. The README beside
this file says what each one is and why it is refused (a test keeps it complete).
"""

from tests.attacks.builders import Attack, base, registered

from tests.attacks import on_config, on_experts, on_files, on_headers, on_index, on_model  # noqa: F401  # isort: skip

ATTACKS: list[Attack] = registered()

__all__ = ["ATTACKS", "Attack", "base"]
