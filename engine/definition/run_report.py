"""The numbers that a run reports at its end, and the line that shows them. Measures nothing itself."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Report:
    """Counts and times of one run, filled in while it runs. `decode_s` covers the passes after the prompt."""

    resumed_tokens: int = 0  # taken in by the saved state that the run continues
    prompt_tokens: int = 0  # taken in by this run
    generated_tokens: int = 0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_passes: int = 0
    read_bytes: int = 0  # bytes of experts requested from the drives
    read_wait_s: float = 0.0  # part of prefill_s and decode_s spent waiting for experts
    cache_hits: int = 0
    cache_misses: int = 0
    prefetched: int = 0  # experts that look-ahead began to read
    prefetch_hits: int = 0  # prefetched experts that a layer then asked for
    read_retries: int = 0
    checked_bytes: int = 0  # read bytes that were compared with their digests
    unchecked_bytes: int = 0
    peak_rss_bytes: int = 0

    @property
    def prefill_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_per_s(self) -> float:
        """Generated tokens per second."""
        return self.decode_passes / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def read_gb_per_s(self) -> float:
        """Bytes of experts per second of prefill and decode, in GB/s."""
        busy_s = self.prefill_s + self.decode_s
        return self.read_bytes / busy_s / 1e9 if busy_s > 0 else 0.0

    def line(self) -> str:
        """Return the report as one line of text."""
        # A run of one token makes no pass of decoding: the prefill gives the first token.
        decode = f"{self.decode_per_s:.2f}" if self.decode_passes else "-"
        resumed = f"resumed {self.resumed_tokens} tokens | " if self.resumed_tokens else ""
        ahead = f"prefetched {self.prefetched}, {self.prefetch_hits} used | " if self.prefetched else ""
        return (
            f"load {self.load_s:.2f} s | {resumed}"
            f"prefill {self.prompt_tokens} tokens, {self.prefill_per_s:.2f} tok/s | "
            f"decode {self.generated_tokens} tokens, {decode} tok/s | "
            f"read {self.read_bytes / 1e9:.3f} GB, {self.read_gb_per_s:.3f} GB/s | {ahead}"
            f"peak RSS {self.peak_rss_bytes / 1e9:.3f} GB"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, and the rates, by name."""
        rates = {
            "prefill_per_s": self.prefill_per_s,
            "decode_per_s": self.decode_per_s,
            "read_gb_per_s": self.read_gb_per_s,
        }
        return {key: round(value, 6) if isinstance(value, float) else value
                for key, value in (asdict(self) | rates).items()}  # fmt: skip


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
