"""SHA-256 of several messages side by side: for files that are read at once, whose digests are chains.

One message alone leaves most of a core idle, since each step needs the one before. With SHA instructions two
messages share a core's units, without them as many as its vectors have lanes. The definition is `hashlib.sha256`
(FIPS 180-4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3.kernels import _kernels
from k3.kernels.arrays import Bytes

AT_ONCE = 64
"""Most messages that one call of `sha256_update` takes."""
_MESSAGE_WORDS = 13
"""Words of 64 bits that the native code keeps a message in (kernels/src/sha256.h)."""


class Sha256:
    """A message of which some bytes have been taken in. Used by one thread at a time."""

    def __init__(self) -> None:
        self._message = np.empty(_MESSAGE_WORDS, np.uint64)
        _kernels.sha256_begin(self._message)

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far, in hexadecimal; more may follow."""
        digest = np.empty(32, np.uint8)
        _kernels.sha256_digest(self._message, digest)
        return digest.tobytes().hex()


def sha256_update(messages: Sequence[Sha256], data: Sequence[Bytes]) -> None:
    """Append to each of `messages`, up to `AT_ONCE` different ones, its array of `data`, uint8 and contiguous.

    Releases the GIL. ValueError for too many messages, for unequal numbers, and for a message that is named twice.
    """
    _kernels.sha256_update([message._message for message in messages], list(data))


def sha256_side_by_side() -> int:
    """Return how many messages this CPU hashes side by side; 1 where `hashlib` is the faster way.

    With more messages, a call takes longer in proportion.
    """
    return _kernels.sha256_side_by_side()
