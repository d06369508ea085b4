"""`attach`: a daemon's model and its experts over one connection, for programs other than `k3-run`."""

from __future__ import annotations

from pathlib import Path

from k3.store.client.daemon_model import DaemonModel
from k3.store.client.daemon_source import RECONNECT_S, DaemonSource
from k3.store.client.socket_link import Link


def attach(
    path: Path,
    *,
    name: str = "k3",
    patience_s: float = 60.0,
    reconnect_s: float = RECONNECT_S,
    debug: bool = False,
) -> tuple[DaemonModel, DaemonSource]:
    """Connect to the daemon whose socket is `path`; return its model and a source of its experts.

    `name` is what `k3-store ps` shows of this client. The other arguments are `DaemonSource`'s. Close both when
    they are done with, the source first. DaemonError when no daemon is there or it refuses, WireError when it
    cannot be understood.
    """
    link = Link.open(path, name)
    try:
        model = DaemonModel(link)
        source = DaemonSource(
            path, name=name, link=link, identity=model.identity,
            patience_s=patience_s, reconnect_s=reconnect_s, debug=debug,
        )  # fmt: skip
    except BaseException:
        link.close()
        raise
    return model, source
