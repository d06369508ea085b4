"""The body of `k3-store warm`: lease experts and give them back at once, so that the daemon keeps them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3.base.cli_support import Progress
from k3.base.errors import UnsupportedError
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import Link


def warm(
    socket: Path, layers: Sequence[int] | None, experts: Sequence[int] | None, *, as_json: bool = False
) -> dict[str, Any]:
    """Read these experts of these layers (None: all) into the cache.

    UnsupportedError when the cache has room for fewer; ExpertError for one that is not there.
    """
    link = Link.open(socket, "k3-store warm")
    descriptor = link.descriptor()
    chosen = {
        layer: list(experts) if experts is not None else list(range(descriptor.layers[layer].experts))
        if layer in descriptor.layers else []
        for layer in (descriptor.layers if layers is None else layers)
    }  # fmt: skip
    count = sum(map(len, chosen.values()))
    slots = link.welcome.slots
    source = DaemonSource(socket, link=link, reconnect_s=0)
    try:
        if count > slots:
            raise UnsupportedError(
                f"{count} experts do not fit into a cache of {slots}", path=socket,
                advice="Name fewer with --layers and --experts, or give the daemon more --cache-gb",
            )  # fmt: skip
        began_s = time.monotonic()
        progress = Progress("warming", count * link.welcome.slot_bytes, as_json=as_json)
        try:
            for layer, ids in chosen.items():
                for lease in source.lease(layer, ids):
                    with lease:
                        progress.advance(link.welcome.slot_bytes)
        finally:
            progress.close()
        stats = source.stats()
        return {
            "experts": count, "read": stats.misses, "read_bytes": stats.read_bytes,
            "seconds": round(time.monotonic() - began_s, 3),
        }  # fmt: skip
    finally:
        source.close()
