"""The reader of the safetensors package, with types that the package leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors

deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
