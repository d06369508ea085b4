"""Options of every command that takes a model, and the settings that they stand for.

There are two decorators, because --help lists options in the order in which a user decides: first the model, then
the command's own options, then the way it is run. Imports no NumPy and no part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from k3.base.option_types import Real, Whole, directories_option
from k3.engine.launch.run_option_types import Layers

if TYPE_CHECKING:
    from k3.engine.definition.settings import ModelSettings

Command = TypeVar("Command", bound=Callable[..., Any])

_BITS = click.Choice(["4", "8", "16", "32"])
_PLACE = click.Path(path_type=Path, readable=False)  # that it may not be used is told when it is opened

_WHICH_MODEL = (
    click.option("--container", type=_PLACE, help="Run from a container made by k3-repack."),
    directories_option(
        "--dirs", help="With --container: the directories of its roots.", show_envvar=True, envvar="K3_DIRS"
    ),
    click.option(
        "--snapshot",
        type=_PLACE,
        multiple=True,
        help="Run from a raw snapshot; several times if it lies in several directories.",
    ),
    click.option(
        "--store",
        type=_PLACE,
        show_envvar=True,
        envvar="K3_STORE",
        help="Run from the k3-store daemon on this socket, which serves the model and its experts.",
    ),
    click.option(
        "--fallback",
        type=click.Choice(["file"]),
        help="With --store: read experts from the container's files while no daemon runs.",
    ),
    click.option(
        "--bits",
        type=_BITS,
        show_envvar=True,
        envvar="K3_BITS",
        help="With --snapshot: bits of weight matrices, quantized while loading.  [default: 8]",
    ),
    click.option(
        "--mla-bits",
        type=_BITS,
        show_envvar=True,
        envvar="K3_MLA_BITS",
        help="The same for attention matrices of full-attention layers.  [default: 8]",
    ),
    click.option(
        "--head-bits",
        type=_BITS,
        show_envvar=True,
        envvar="K3_HEAD_BITS",
        help="The same for lm_head.  [default: 8]",
    ),
)

_HOW_TO_RUN = (
    click.option(
        "--topp",
        "keep_share",
        type=Real(0, 1, above=True),
        default=1.0,
        show_envvar=True,
        envvar="K3_TOPP",
        help="Use only a token's heaviest experts that make up this share of its weights. "
        "Below 1 this changes the model.",
    ),
    click.option(
        "--layers",
        type=Layers(),
        show_envvar=True,
        envvar="K3_LAYERS",
        help="Run only the first N layers, or layers A-B (from 0). For measurements; the text is meaningless.",
    ),
    click.option(
        "--idot/--exact",
        "int8_activations",
        default=True,
        show_envvar=True,
        envvar="K3_IDOT",
        help="Activations in int8 where weights are integers, or in float32 everywhere.",
    ),
    click.option(
        "--mla-eps",
        type=click.Choice(["1e-6", "1e-5"]),
        default="1e-6",
        help="Epsilon of the latent norms: 1e-6 as in the published code, or 1e-5 as in some other engines.",
    ),
    click.option(
        "--latent-dtype",
        "latent_type",
        type=click.Choice(["f32", "bf16", "f16"]),
        default="f32",
        help="Type of the latent cache of full-attention layers. bf16 and f16 take half the memory, and change "
        "results slightly.",
    ),
    click.option(
        "--expert-gb",
        type=Real(0, 1e9),
        show_envvar=True,
        envvar="K3_EXPERT_GB",
        help="Memory for the expert cache, in GB.  [default: what is left, at most all experts]",
    ),
    click.option(
        "--prefetch",
        type=Whole(0, 1024),
        show_envvar=True,
        envvar="K3_PREFETCH",
        help="Look-ahead: read at most this many experts of a layer before it asks for them; 0 turns it off.  "
        "[default: as many as a token uses; 0 when all experts fit in memory or a daemon has them]",
    ),
    click.option(
        "--direct/--no-direct",
        default=True,
        show_envvar=True,
        envvar="K3_DIRECT",
        help="Read experts past the page cache, where the file system can.",
    ),
    click.option(
        "--verify-reads",
        "verify",
        type=click.Choice(["always", "first", "never"]),
        default="always",
        help="Reads of experts that are compared with their digests.",
    ),
    click.option("--threads", type=Whole(1, 1024), help="Arithmetic threads.  [default: one per core]"),
)

_DAEMON_OPTIONS = {
    "dirs": ("--dirs", "--dirs"), "expert_gb": ("--expert-gb", "--cache-gb"), "direct": ("--direct", "--direct"),
    "verify": ("--verify-reads", "--verify-reads"),
}  # fmt: skip
"""Options that a daemon decides for all its clients, and the options of `k3-store serve` that set them."""


def model_options(command: Command) -> Command:
    """Add the options that choose a model, its place and its bits."""
    return _with(command, _WHICH_MODEL)


def engine_options(command: Command) -> Command:
    """Add the options that choose layers, arithmetic, memory and threads."""
    return _with(command, _HOW_TO_RUN)


def _with(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Return the command with these options, in this order under --help."""
    for option in reversed(options):
        command = option(command)
    return command


def model_settings(options: dict[str, Any]) -> ModelSettings:
    """Return the options of both decorators as settings. click.UsageError for contradictions."""
    from k3.engine.definition.settings import ModelSettings

    container, snapshot, store = options["container"], options["snapshot"], _store(options)
    if container is not None and snapshot:
        raise click.UsageError("--container and --snapshot give two models; leave one of them out.")
    if container is None and not snapshot and store is None:
        raise click.UsageError("No model: give --container, --snapshot or --store.")
    if snapshot and on_command_line("dirs"):
        raise click.UsageError("--dirs gives the roots of a container and cannot be used with --snapshot.")
    bits, mla_bits, head_bits = (
        None if options[key] is None or store is not None else int(options[key])
        for key in ("bits", "mla_bits", "head_bits")
    )
    expert_gb = options["expert_gb"]
    return ModelSettings(
        container=container,
        roots=options["dirs"],
        snapshot=tuple(snapshot),
        store=store,
        fallback=options["fallback"],
        bits=bits,
        mla_bits=mla_bits,
        head_bits=head_bits,
        layers=options["layers"],
        mla_eps=float(options["mla_eps"]),
        latent_type=options["latent_type"],
        exact=not options["int8_activations"],
        keep_share=options["keep_share"],
        expert_bytes=None if expert_gb is None else int(expert_gb * 1e9),
        prefetch=options["prefetch"],
        direct=options["direct"],
        verify=options["verify"],
        threads=options["threads"],
    )


def _store(options: dict[str, Any]) -> Path | None:
    """Return the socket of the daemon that this run uses, None without one.

    A container or snapshot on the command line has precedence over K3_STORE in the environment.
    """
    store: Path | None = options["store"]
    named = options["container"] is not None or options["snapshot"]
    if store is not None and named and not on_command_line("store") and options["fallback"] is None:
        return None
    if store is None:
        if options["fallback"] is not None:
            raise click.UsageError("--fallback needs --store.")
        return None
    if options["snapshot"]:
        raise click.UsageError("--store and --snapshot give two models; leave one of them out.")
    if options["fallback"] is None:
        if named:
            raise click.UsageError(
                "--store and --container give two models; leave one out, or add --fallback file."
            )
        for name, (option, daemon_option) in _DAEMON_OPTIONS.items():
            if on_command_line(name):
                raise click.UsageError(
                    f"{option} cannot be used with --store; set {daemon_option} on k3-store serve."
                )
    for name in ("bits", "mla_bits", "head_bits"):
        if on_command_line(name):
            raise click.UsageError(
                f"--{name.replace('_', '-')} cannot be used with --store: "
                "it was chosen when the container was made."
            )
    return store


def on_command_line(name: str) -> bool:
    """Return True for an option given on the command line, not by the environment or a default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE
