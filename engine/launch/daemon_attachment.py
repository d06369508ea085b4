"""Attach a run to a k3-store daemon: its socket gives the model, and leases of experts.

`attach` opens the connection that `open_experts` later takes over. With the fallback "file", experts are read
from the container's files while no daemon runs; the container must then be the one that the daemon serves. Main
thread only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base.errors import DaemonError
from k3.container.reader import Container
from k3.engine.definition.settings import ModelSettings
from k3.model.identity import ModelIdentity
from k3.model.model_source import ModelSource
from k3.store.client.daemon_model import DaemonModel
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import Link, ask_status
from k3.store.lending.file_source import FileSource
from k3.store.source import ExpertSource

_log = logging.getLogger("k3.store")


@dataclass(slots=True)
class Attachment:
    """A daemon's model, or the container used in its place while no daemon runs."""

    socket: Path
    source: ModelSource
    link: Link | None
    opened: list[Container] = field(default_factory=list)

    def status(self) -> dict[str, Any] | None:
        """Ask the daemon for its status; None while the container is used in its place. DaemonError."""
        return None if self.source.has_extents else ask_status(self.socket)

    def close(self) -> None:
        """Close the files, and the connection unless `open_experts` has taken it over."""
        if self.link is not None:
            self.link.close()
            self.link = None
        self.source.close()
        while self.opened:
            self.opened.pop().close()


def attach(settings: ModelSettings) -> Attachment:
    """Connect to `settings.store`. DaemonError without a daemon, unless there is a container to use instead."""
    assert settings.store is not None
    try:
        link = Link.open(settings.store, f"k3-run {os.getpid()}")
    except DaemonError as error:
        if settings.fallback != "file" or settings.container is None:
            raise
        _log.warning("%s; reading from %s until a daemon runs", error.problem, settings.container)
        return Attachment(settings.store, Container.open(settings.container, settings.roots), None)
    try:
        model = DaemonModel(link)
        _check_fallback(model, settings)
        return Attachment(settings.store, model, link)
    except BaseException:
        link.close()
        raise


def _check_fallback(model: DaemonModel, settings: ModelSettings) -> None:
    """Refuse a container for the fallback that is another model, now and not when the daemon is gone."""
    if settings.fallback == "file" and settings.container is not None:
        container = Container.open(settings.container, settings.roots)
        try:
            _check_same(container, model.identity)
        finally:
            container.close()


def _check_same(container: Container, identity: ModelIdentity) -> None:
    """Raise DaemonError unless the container is the model with this identity."""
    if container.identity != identity:
        raise DaemonError(
            f"this container is not the model that k3-store serves: {container.identity.differences(identity)}",
            path=container.home,
            advice="Give the container that the daemon serves by --container and --dirs",
        )


def open_experts(
    attachment: Attachment, settings: ModelSettings, *, cache_bytes: int, prefetch_slots: int
) -> DaemonSource:
    """Return a source of experts that takes over the attachment's connection.

    `cache_bytes` and `prefetch_slots` are for the files that it falls back to.
    """
    link, attachment.link = attachment.link, None
    identity = attachment.source.identity
    home = settings.container or attachment.source.directories[0]
    roots = settings.roots or attachment.source.directories

    def fall_back() -> ExpertSource:
        container = Container.open(home, roots)
        attachment.opened.append(container)
        _check_same(container, identity)
        return FileSource(
            container, cache_bytes=cache_bytes, prefetch_slots=prefetch_slots, direct=settings.direct,
            verify=settings.verify,
        )  # fmt: skip

    return DaemonSource(
        attachment.socket,
        name=f"k3-run {os.getpid()}",
        link=link,
        fallback=fall_back if settings.fallback == "file" else None,
        identity=identity,
    )
