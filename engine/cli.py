"""`k3-run`: parse, call, print. The only file of this room that reads the environment.

Everything heavy is imported inside the command, so that --help and wrong usage answer at once.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3.container import console
from k3.container.errors import ExitCode

if TYPE_CHECKING:
    from k3.engine.settings import ModelSettings, RunSettings

_IDS = re.compile(r"^\s*[0-9]+\s*(,\s*[0-9]+\s*)*$")
_MAX_DIGITS = 10  # a longer number cannot be a token id; Python would take very long to parse a very long one

DEFAULT_GENERATE = 32
DEFAULT_CHUNK = 64

_EXIT_CODES = (
    ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.SOURCE, ExitCode.INCOMPLETE,
    ExitCode.NOT_A_CONTAINER, ExitCode.DRIVE, ExitCode.SPACE, ExitCode.UNSUPPORTED, ExitCode.INTERRUPTED,
)  # fmt: skip


class _Ids(click.ParamType["tuple[int, ...]"]):
    """Token ids: 1,2,3."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not _IDS.match(value):
            self.fail(f"{_short(value)} is not a list of token ids such as 1,2,3", param, ctx)
        items = [item.strip() for item in value.split(",")]
        if any(len(item) > _MAX_DIGITS for item in items):
            self.fail("a number in the list is too large for a token id", param, ctx)
        return tuple(int(item) for item in items)


class _Real(click.ParamType[float]):
    """A finite number between two bounds, the lower one possibly excluded."""

    name = "number"

    def __init__(self, least: float, most: float = math.inf, *, above: bool = False) -> None:
        self._least, self._most, self._above = least, most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{_short(value)} is not a number", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{_short(value)} is not a finite number", param, ctx)
        low = number <= self._least if self._above else number < self._least
        if low or number > self._most:
            bound = f"above {self._least:g}" if self._above else f"at least {self._least:g}"
            most = "" if math.isinf(self._most) else f" and at most {self._most:g}"
            self.fail(f"{_short(value)} is not {bound}{most}", param, ctx)
        return number


class _Layers(click.ParamType[str]):
    """4 (the first four) or 2-5."""

    name = "n|a-b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from k3.engine.config import parse_layers

        try:
            parse_layers(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


_BITS = click.Choice(["4", "8", "16", "32"])
_DIRECTORY = click.Path(path_type=Path)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    epilog=console.exit_code_help(_EXIT_CODES),
)
@click.argument("text", required=False)
@click.option("--container", type=_DIRECTORY, help="Run from a container made by k3-repack.")
@click.option(
    "--dirs",
    type=console.DirectoryList(),
    show_envvar=True,
    envvar="K3_DIRS",
    default=(),
    help="With --container: where its roots are.",
)
@click.option(
    "--snapshot",
    type=_DIRECTORY,
    multiple=True,
    help="Run from a raw snapshot; several times if it lies in several directories.",
)
@click.option(
    "--store",
    type=_DIRECTORY,
    show_envvar=True,
    envvar="K3_STORE",
    help="Run on the k3-store daemon that serves on this socket: model and experts come from there.",
)
@click.option(
    "--fallback",
    type=click.Choice(["file"]),
    help="With --store: while there is no daemon, read experts from the container's files.",
)
@click.option(
    "--bits",
    type=_BITS,
    show_envvar=True,
    envvar="K3_BITS",
    help="With --snapshot: bits of weight matrices, quantized while loading.  [default: 8]",
)
@click.option(
    "--mla-bits",
    type=_BITS,
    show_envvar=True,
    envvar="K3_MLA_BITS",
    help="The same for attention matrices of full-attention layers.  [default: 8]",
)
@click.option(
    "--head-bits", type=_BITS, show_envvar=True, envvar="K3_HEAD_BITS", help="The same for lm_head.  [default: 8]"
)
@click.option("--ids", type=_Ids(), help="The prompt as token ids, 1,2,3. Ids are printed too.")
@click.option("--prompt", help="The prompt as text (the same as the argument).")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="The prompt from a UTF-8 file; - is stdin.",
)
@click.option("--ngen", type=click.IntRange(0), default=DEFAULT_GENERATE, help="Tokens to generate at most.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends the message.")
@click.option("--temperature", type=_Real(0), default=0.0, help="0 always takes the likeliest token.")
@click.option(
    "--top-p",
    type=_Real(0, 1, above=True),
    default=1.0,
    help="Draw from the smallest set of likely tokens with this probability.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the draw.  [default: chosen and printed]")
@click.option(
    "--chunk",
    type=click.IntRange(1),
    default=DEFAULT_CHUNK,
    show_envvar=True,
    envvar="K3_CHUNK",
    help="Prompt tokens per pass. More of them share each expert's read; the result is the same.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    show_envvar=True,
    envvar="K3_MAXT",
    help="Refuse prompt and generation longer than this together.  [default: the model's context]",
)
@click.option(
    "--topp",
    "keep_share",
    type=_Real(0, 1, above=True),
    default=1.0,
    show_envvar=True,
    envvar="K3_TOPP",
    help="Use only a token's heaviest experts that make up this share of its weights. "
    "Below 1 this changes the model.",
)
@click.option(
    "--layers",
    type=_Layers(),
    show_envvar=True,
    envvar="K3_LAYERS",
    help="Run only the first N layers, or layers A-B (from 0). For measuring; the text is nonsense.",
)
@click.option("--exact", is_flag=True, help="Float32 activations everywhere, instead of int8 where weights are.")
@click.option(
    "--mla-eps",
    type=click.Choice(["1e-6", "1e-5"]),
    default="1e-6",
    help="Epsilon of the latent norms: the published code's, or the one some other engines use.",
)
@click.option(
    "--expert-gb",
    type=_Real(0),
    show_envvar=True,
    envvar="K3_EXPERT_GB",
    help="Memory for the expert cache, in GB.  [default: what is left, at most all experts]",
)
@click.option(
    "--direct/--no-direct",
    default=True,
    show_envvar=True,
    envvar="K3_DIRECT",
    help="Read experts past the page cache, where the file system can.",
)
@click.option(
    "--verify-reads",
    "verify",
    type=click.Choice(["always", "first", "never"]),
    default="always",
    help="Which reads of experts are compared with their digests.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Arithmetic threads.  [default: one per core]")
@click.option(
    "--logits",
    type=click.Path(path_type=Path, dir_okay=False),
    show_envvar=True,
    envvar="K3_LOGITS",
    help="Write raw float32 logits: a row per prompt position, then per generated token.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    show_envvar=True,
    envvar="K3_TRACE",
    help="Write timings, reads and chosen experts as JSON lines.",
)
@click.option(
    "--route-trace",
    type=click.Path(path_type=Path, dir_okay=False),
    show_envvar=True,
    envvar="K3_ROUTE_TRACE",
    help="Write the experts that each token chose, compactly, for k3-store simulate.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout: tokens as they come, then a summary.")
def main(**options: Any) -> None:
    """Continue a prompt with a Kimi K3 model.

    The prompt is TEXT, --prompt, --prompt-file or --ids. Text is taken as it is: no chat markup, no special
    tokens. The continuation goes to stdout as it comes, warnings and timing go to stderr.
    """
    settings = _settings(options)

    def body() -> None:
        from k3.engine.run import run

        run(settings)

    console.run(body, as_json=settings.as_json, on_interrupt="what was generated so far is all")


def _settings(options: dict[str, Any]) -> RunSettings:
    """Options as settings. click.UsageError for combinations that mean nothing."""
    from k3.engine.sampler import SamplerOptions
    from k3.engine.settings import RunSettings

    ids, text = _prompt(options)
    return RunSettings(
        model=_model_settings(options),
        ids=ids,
        text=text,
        generate=options["ngen"],
        sampler=SamplerOptions(options["temperature"], options["top_p"], _seed(options)),
        chunk=options["chunk"],
        max_tokens=options["max_tokens"],
        ignore_eos=options["ignore_eos"],
        logits=options["logits"],
        trace=options["trace"],
        route_trace=options["route_trace"],
        as_json=options["as_json"],
    )


def _model_settings(options: dict[str, Any]) -> ModelSettings:
    from k3.engine.settings import ModelSettings

    container, snapshot, store = options["container"], options["snapshot"], _store(options)
    if container is not None and snapshot:
        raise click.UsageError("--container and --snapshot name two models; give one of them.")
    if container is None and not snapshot and store is None:
        raise click.UsageError("Which model? Give --container or --snapshot, or a daemon's --store.")
    if snapshot and _on_command_line("dirs"):
        raise click.UsageError("--dirs says where a container's roots are; with --snapshot it means nothing.")
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
        exact=options["exact"],
        keep_share=options["keep_share"],
        expert_bytes=None if expert_gb is None else int(expert_gb * 1e9),
        direct=options["direct"],
        verify=options["verify"],
        threads=options["threads"],
    )


def _store(options: dict[str, Any]) -> Path | None:
    """The daemon's socket, if this run is on one. A model that is named outweighs K3_STORE in the environment."""
    store: Path | None = options["store"]
    named = options["container"] is not None or options["snapshot"]
    if store is not None and named and not _on_command_line("store") and options["fallback"] is None:
        return None
    if store is None:
        if options["fallback"] is not None:
            raise click.UsageError("--fallback is for --store: which daemon?")
        return None
    if options["snapshot"]:
        raise click.UsageError("--store and --snapshot name two models; give one of them.")
    if options["fallback"] is None:
        if named:
            raise click.UsageError("--store and --container name two models; together only with --fallback file.")
        for name in ("dirs", "expert_gb", "direct", "verify"):
            if _on_command_line(name):
                raise click.UsageError(f"--{name.replace('_', '-')} is the daemon's business, given --store.")
    for name in ("bits", "mla_bits", "head_bits"):
        if _on_command_line(name):
            raise click.UsageError(f"--{name.replace('_', '-')} was decided when the container was made.")
    return store


def _prompt(options: dict[str, Any]) -> tuple[tuple[int, ...] | None, str | None]:
    """The one prompt that was given, as ids or as text."""
    given = [key for key in ("ids", "text", "prompt", "prompt_file") if options[key] is not None]
    names = {"ids": "--ids", "text": "TEXT", "prompt": "--prompt", "prompt_file": "--prompt-file"}
    if not given:
        raise click.UsageError("No prompt: give TEXT, --prompt, --prompt-file or --ids.")
    if len(given) > 1:
        raise click.UsageError(f"Several prompts: {', '.join(names[key] for key in given)}. Give one.")
    if given == ["ids"]:
        return options["ids"], None
    text = _read_text(options["prompt_file"]) if given == ["prompt_file"] else options[given[0]]
    if not text:
        raise click.UsageError(f"The prompt ({names[given[0]]}) is empty.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"The prompt ({names[given[0]]}) is not valid UTF-8.") from None
    return None, text


def _read_text(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise click.UsageError(f"--prompt-file {path} cannot be read: {error.strerror}.") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--prompt-file {path} is not UTF-8 at byte {error.start}.") from None


def _on_command_line(name: str) -> bool:
    """Whether an option was typed, and does not come from the environment or a default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _seed(options: dict[str, Any]) -> int:
    """The seed that was given, or a fresh one that the user is told, so that the draw can be repeated."""
    if options["seed"] is not None:
        return int(options["seed"])
    if options["temperature"] == 0:
        return 0
    import secrets

    seed = secrets.randbits(32)
    if not options["as_json"]:
        click.echo(f"seed {seed}", err=True)
    return seed


def _short(value: Any) -> str:
    """A user's word for an error message, cut if it is very long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
