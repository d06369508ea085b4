"""`k3-store`: parse, call, print. The only file of this room that reads the environment.

Everything heavy is imported inside the commands, so that --help and wrong usage answer at once.
"""

from __future__ import annotations

import grp
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from k3.base import cli_support
from k3.base.cli_support import echo
from k3.base.errors import ExitCode
from k3.base.option_types import Real, Whole, directories_option, short
from k3.container.layout import VERSION
from k3.store.routing.simulate_command import simulate_command

_F = TypeVar("_F", bound=Callable[..., Any])

_CODES = (
    ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.SOURCE, ExitCode.INCOMPLETE,
    ExitCode.NOT_A_CONTAINER, ExitCode.DRIVE, ExitCode.UNSUPPORTED, ExitCode.DAEMON, ExitCode.INTERRUPTED,
)  # fmt: skip
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
_EPILOG = cli_support.exit_code_help(_CODES)
_PLACE = click.Path(path_type=Path, readable=False)
"""A directory or a socket. That it may not be used is no wrong usage, and is told when it is opened."""


class _Depths(click.ParamType["tuple[int, ...]"]):
    """Numbers from 1 to 64 separated by commas."""

    name = "n,n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        items = str(value).split(",")
        if not all(
            item.isascii() and item.isdecimal() and len(item) < 4 and 1 <= int(item) <= 64 for item in items
        ):
            self.fail(f"{short(value)} is not a list of depths from 1 to 64 such as 1,2,4", param, ctx)
        return tuple(map(int, items))


class _MetricsPlace(click.ParamType["int | Path"]):
    """A port, or the path of a Unix socket after `unix:`."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Path:
        if isinstance(value, int | Path):
            return value
        kind, _, path = str(value).partition(":")
        if kind == "unix" and path:
            return self._expanded(path, param, ctx)
        if not (value.isascii() and value.isdecimal() and len(value) < 6 and int(value) < 65536):
            self.fail(f"{short(value)} is neither a port from 0 to 65535 nor unix:PATH", param, ctx)
        return int(value)

    def _expanded(self, path: str, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path with a leading ~ replaced, which no shell does after `unix:`."""
        try:
            return Path(path).expanduser()
        except RuntimeError:
            self.fail(f"{short(path)}: there is no such home directory; write ./~ for a name", param, ctx)


def _socket_option(command: _F) -> _F:
    return click.option(
        "--socket",
        type=_PLACE,
        show_envvar=True,
        envvar="K3_STORE",
        help="The daemon's socket.  [default: k3-store.sock in $XDG_RUNTIME_DIR/k3-store, else in /run/k3-store]",
    )(command)


def _places(command: _F) -> _F:
    command = click.option(
        "--container",
        type=_PLACE,
        help="The container's home, if it is not the one with a manifest in --dirs.",
    )(command)
    return directories_option(
        "--dirs", help="Every directory of the container.", show_envvar=True, envvar="K3_DIRS"
    )(command)


def _json_option(command: _F) -> _F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON object (bench: a line each) on stdout.")(
        command
    )


@click.group(cls=cli_support.Group, context_settings=_SETTINGS, epilog=_EPILOG)
@cli_support.version_option(VERSION)
def main() -> None:
    """One daemon owns the drives and the memory; any number of engines lease experts from it."""


@main.command(context_settings=_SETTINGS, epilog=_EPILOG)
@_places
@_socket_option
@click.option(
    "--cache-gb",
    type=Real(0, 1e9),
    show_envvar=True,
    envvar="K3_CACHE_GB",
    help="Memory for experts, in GB.  [default: what is free less a reserve, at most the whole model]",
)
@click.option(
    "--reserve-gb",
    type=Real(0, 1e9),
    help="Memory left to everybody else, in GB.  [default: a tenth of what is free, at least 1 GiB]",
)
@click.option("--max-clients", type=Whole(1, 64), default=8, help="Engines that may be attached at once.")
@click.option(
    "--quota",
    type=Whole(1, 512),
    help="Experts that each client may hold at once.  [default: half of the slots divided by clients, 32 to 512]",
)
@click.option("--policy", default="least-stale", help="Which experts stay in memory; see simulate.")
@click.option(
    "--io-depth",
    type=Whole(1, 64),
    default=4,
    show_envvar=True,
    envvar="K3_IO_DEPTH",
    help="Reads under way per drive.",
)
@click.option(
    "--verify-reads",
    "verify",
    type=click.Choice(["always", "first", "never"]),
    default="always",
    help="Which reads are compared with their digests.",
)
@click.option(
    "--direct/--no-direct",
    default=True,
    show_envvar=True,
    envvar="K3_DIRECT",
    help="Read past the page cache, where the file system can.",
)
@click.option("--group", help="Let members of this group connect too.")
@click.option(
    "--clients-per-user",
    type=Whole(1, 64),
    help="Engines that one member of --group may attach at once.  [default: all places but one]",
)
@click.option(
    "--metrics",
    type=_MetricsPlace(),
    metavar="PORT|unix:PATH",
    help="Serve Prometheus metrics on 127.0.0.1:PORT, which every user may read, or on a Unix socket.",
)
@click.option("--drain-s", type=Real(0, 600), default=5.0, help="How long reads may take to end on SIGTERM.")
@click.option("--log-json", is_flag=True, help="Log JSON lines instead of text (on stderr).")
def serve(**options: Any) -> None:
    """Serve a container's experts on a socket until SIGTERM, SIGINT or SIGHUP.

    Runs in the foreground; under systemd it says when it is ready (Type=notify) and takes a socket that systemd
    made. A second daemon on the same socket is refused.
    """
    settings = _serve_options(options)

    def body() -> None:
        from k3.store.daemon.serve import serve as serve_now
        from k3.store.daemon.systemd import Supervisor

        serve_now(settings, Supervisor.from_environment(os.environ, os.getpid()))

    cli_support.run(body, as_json=options["log_json"])


@main.command(context_settings=_SETTINGS, epilog=_EPILOG)
@_socket_option
@_json_option
def status(socket: Path | None, as_json: bool) -> None:
    """Drives, cache and clients of a running daemon."""

    def body() -> None:
        from k3.store.client.socket_link import ask_status, reading_status
        from k3.store.daemon.status_text import status_lines

        place = _socket(socket)
        found = ask_status(place)
        if as_json:
            cli_support.emit_json("status", **{key: value for key, value in found.items() if key != "type"})
            return
        with reading_status(place):
            text = "\n".join(status_lines(found))
        echo(text)

    cli_support.run(body, as_json=as_json)


@main.command(context_settings=_SETTINGS, epilog=_EPILOG)
@_socket_option
@_json_option
def ps(socket: Path | None, as_json: bool) -> None:
    """Engines attached to a running daemon, what they hold, and the reads that keep them waiting."""

    def body() -> None:
        from k3.store.client.socket_link import ask_status, reading_status
        from k3.store.daemon.status_text import DRIVE_OF_PS, ps_lines

        place = _socket(socket)
        found = ask_status(place)
        with reading_status(place):
            clients = found["clients"]
            drives = [{key: drive[key] for key in DRIVE_OF_PS} for drive in found["drives"]]
            text = "\n".join(ps_lines(found))
        if as_json:
            cli_support.emit_json("ps", clients=clients, drives=drives)
        else:
            echo(text)

    cli_support.run(body, as_json=as_json)


@main.command(context_settings=_SETTINGS, epilog=_EPILOG)
@_places
@_socket_option
@click.option("--no-daemon", is_flag=True, help="Measure the drives only.")
@click.option("--depths", type=_Depths(), default="1,2,4,8,16", help="Reads under way per drive.")
@click.option("--seconds", type=Real(0.05, 600), default=2.0, help="Time for each measurement.")
@click.option("--seed", type=Whole(0), default=0, help="Chooses the experts.")
@_json_option
def bench(
    dirs: tuple[Path, ...], container: Path | None, socket: Path | None, as_json: bool, **options: Any
) -> None:
    """Measure the drives with random expert-sized reads, then the same experts through the daemon.

    Without --dirs and --container, the container of the running daemon is measured. Numbers that did not come from
    a drive are refused.
    """

    def body() -> None:
        from k3.store.commands.bench_command import measure
        from k3.store.commands.drive_bench import BenchOptions

        measure(
            dirs, container, None if options["no_daemon"] else _socket(socket),
            BenchOptions(options["depths"], options["seconds"], options["seed"]), as_json=as_json,
        )  # fmt: skip

    cli_support.run(body, as_json=as_json)


@main.command(context_settings=_SETTINGS, epilog=_EPILOG)
@_socket_option
@click.option("--layers", help="Layers A-B or A,B,... (from 0).  [default: all that have experts]")
@click.option("--experts", help="Experts A-B or A,B,... of each of these layers.  [default: all]")
@_json_option
def warm(socket: Path | None, layers: str | None, experts: str | None, as_json: bool) -> None:
    """Have a running daemon read experts into its cache."""
    chosen_layers, chosen_experts = _numbers("--layers", layers), _numbers("--experts", experts)

    def body() -> None:
        from k3.store.commands.warm import warm as warm_now

        done = warm_now(_socket(socket), chosen_layers, chosen_experts, as_json=as_json)
        if as_json:
            cli_support.emit_json("warm", **done)
        else:
            echo("{experts} experts, {read} of them read ({read_bytes} bytes) in {seconds} s".format(**done))

    cli_support.run(body, as_json=as_json)


main.add_command(simulate_command)


def _socket(given: Path | None) -> Path:
    from k3.store.protocol.socket_file import usual_path

    return given or usual_path(os.environ.get("XDG_RUNTIME_DIR"))


def _serve_options(options: dict[str, Any]) -> Any:
    """Options as settings. click.UsageError for combinations that mean nothing."""
    from k3.store.daemon.metrics_server import DESCRIPTORS, MetricsPlace
    from k3.store.daemon.model_service import ServeSettings
    from k3.store.daemon.serve import ServeOptions
    from k3.store.protocol.native import policy_names
    from k3.store.protocol.socket_file import default_path

    if not options["dirs"] and options["container"] is None:
        raise click.UsageError("Which container? Give --dirs (or K3_DIRS) or --container.")
    if options["policy"] not in policy_names():
        raise click.UsageError(f"--policy {short(options['policy'])}: there are {', '.join(policy_names())}.")
    group = _group(options["group"])
    metrics = None
    if isinstance(options["metrics"], Path):
        metrics = MetricsPlace(path=options["metrics"], group=group)
    elif options["metrics"] is not None:
        metrics = MetricsPlace(port=options["metrics"])
    settings = ServeSettings(
        more_descriptors=0 if metrics is None else DESCRIPTORS,
        directories=options["dirs"],
        container=options["container"],
        cache_bytes=_bytes(options["cache_gb"]),
        reserve_bytes=_bytes(options["reserve_gb"]),
        **{key: options[key] for key in ("max_clients", "quota", "policy", "io_depth", "verify", "direct")},
    )
    return ServeOptions(
        service=settings,
        makes_directory=options["socket"] is None,
        socket=options["socket"] or default_path(os.environ.get("XDG_RUNTIME_DIR")),
        group=group,
        metrics=metrics,
        clients_per_user=options["clients_per_user"],
        log_json=options["log_json"],
        drain_s=options["drain_s"],
    )


def _bytes(gb: float | None) -> int | None:
    return None if gb is None else int(gb * 1e9)


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        if name.isascii() and name.isdecimal() and len(name) < 10:
            return int(name)
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):  # ValueError: no text that the system could know
        raise click.UsageError(f"--group {short(name)}: there is no such group.") from None


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the numbers that an option lists: (1, 2, 3, 7) for "1-3,7"."""
    if text is None:
        return None
    numbers: dict[int, None] = {}
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        bounds = [first, last if dash else first]
        if not all(bound.isascii() and bound.isdecimal() and len(bound) < 7 for bound in bounds):
            raise click.UsageError(f"{option} {short(text)} is not a list such as 3 or 1-4,9.")
        more = range(int(bounds[0]), int(bounds[1]) + 1)
        if not more or not numbers.keys().isdisjoint(more):
            raise click.UsageError(f"{option} {short(text)} names something twice, or nothing.")
        numbers |= dict.fromkeys(more)
    return tuple(numbers)


if __name__ == "__main__":
    main()
