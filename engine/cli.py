"""`k3-run`: parse options, call the engine, print. Only this module and `launch/options.py` read the environment.

NumPy and the model are imported inside the commands, so that --help and wrong usage answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3.base import cli_support
from k3.base.errors import ExitCode
from k3.base.option_types import Real, Whole
from k3.container.layout import VERSION
from k3.engine.launch.options import engine_options, model_options, model_settings
from k3.engine.launch.run_option_types import Ids

if TYPE_CHECKING:
    from k3.engine.definition.settings import RunSettings
    from k3.engine.launch.launched import Launched

DEFAULT_GENERATE = 32
DEFAULT_CHUNK = 64

_EXIT_CODES = (
    ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.SOURCE, ExitCode.INCOMPLETE,
    ExitCode.NOT_A_CONTAINER, ExitCode.DRIVE, ExitCode.SPACE, ExitCode.RESUME, ExitCode.UNSUPPORTED,
    ExitCode.DAEMON, ExitCode.INTERRUPTED,
)  # fmt: skip


_COMPLETE = "_K3_RUN_COMPLETE"
"""The variable through which a shell asks for completion, as click names it."""


class _RunOrBench(cli_support.Command):
    """The command `k3-run`. If its first word is `bench`, the other words are the arguments of `k3-run bench`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run `k3-run bench` if the first word says so, else this command. See `click.Command.main`."""
        words = list(sys.argv[1:] if args is None else args)
        if (_words_to_complete() or words)[:1] == ["bench"]:
            from k3.engine.report.bench_command import bench

            name = prog_name or Path(sys.argv[0]).name
            return bench.main(words[1:], f"{name} bench", complete_var or _COMPLETE, standalone_mode, **extra)
        return super().main(words, prog_name, complete_var, standalone_mode, **extra)


def _words_to_complete() -> list[str]:
    """Return the words behind the command that a shell wants completed; an empty list when no shell asks."""
    if not os.environ.get(_COMPLETE, "").endswith("_complete"):
        return []
    from click.shell_completion import split_arg_string

    return split_arg_string(os.environ.get("COMP_WORDS", ""))[1:]


@click.command(
    cls=_RunOrBench,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    epilog=cli_support.exit_code_help(_EXIT_CODES),
)
@click.argument("text", required=False)
@model_options
@click.option("--ids", type=Ids(), help="The prompt as token ids, 1,2,3. Ids are printed too.")
@click.option("--prompt", help="The prompt as text (the same as the argument).")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="The prompt from a UTF-8 file; - is stdin.",
)
@click.option("--ngen", type=Whole(0), default=DEFAULT_GENERATE, help="Tokens to generate at most.")
@click.option("--ignore-eos", is_flag=True, help="Continue after a token that ends the message.")
@click.option("--temperature", type=Real(0, 1e6), default=0.0, help="0 always takes the likeliest token.")
@click.option(
    "--top-p",
    type=Real(0, 1, above=True),
    default=1.0,
    help="Draw from the smallest set of likely tokens with this probability.",
)
@click.option("--seed", type=Whole(0), help="Seed of the draw.  [default: chosen and printed]")
@click.option(
    "--chunk",
    type=Whole(1),
    default=DEFAULT_CHUNK,
    show_envvar=True,
    envvar="K3_CHUNK",
    help="Prompt tokens per pass. More of them share each expert's read; the result is the same.",
)
@click.option(
    "--max-tokens",
    type=Whole(1),
    show_envvar=True,
    envvar="K3_MAXT",
    help="Refuse prompt and generation longer than this together.  [default: the model's context]",
)
@engine_options
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
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Continue the conversation saved in this file, if the file exists, and save it there at the end. "
    "The prompt may be left out; otherwise it must begin with the tokens of the saved conversation.",
)
@click.option(
    "--plan", is_flag=True, help="Load nothing: print the memory that a run takes, and what a token would cost."
)
@click.option(
    "--drive-gb-per-s", type=Real(0, 1e9, above=True), help="With --plan: the drives' rate; not measured then."
)
@click.option(
    "--memory-gb-per-s", type=Real(0, 1e9, above=True), help="With --plan: the memory's rate; not measured then."
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout: tokens as they come, then a summary.")
@cli_support.version_option(VERSION)
def main(**options: Any) -> None:
    """Continue a prompt with a Kimi K3 model.

    The prompt is TEXT, --prompt, --prompt-file or --ids. Text is taken as it is: no chat markup, no special
    tokens. The continuation goes to stdout as it comes, warnings and timing go to stderr.

    `k3-run bench` measures instead; see `k3-run bench --help`. (A prompt that is the one word bench goes through
    --prompt.)
    """
    settings = _settings(options)
    rates = [options[key] and options[key] * 1e9 for key in ("drive_gb_per_s", "memory_gb_per_s")]
    if not options["plan"] and any(rates):
        raise click.UsageError("--drive-gb-per-s and --memory-gb-per-s need --plan.")

    def body() -> None:
        if options["plan"]:
            from k3.engine.report.plan_command import PlanOptions, print_plan

            print_plan(settings, PlanOptions(*rates))
            return
        from k3.engine.launch.launched import launch
        from k3.engine.run.deferred_signals import ended_like_ctrl_c

        with ended_like_ctrl_c(), launch(settings, _import_generate) as launched:
            generate = _import_generate()
            generate(launched, settings)

    cli_support.run(
        body, as_json=settings.as_json, on_interrupt="generation stopped; the tokens printed so far are complete"
    )


def _import_generate() -> Callable[[Launched, RunSettings], None]:
    """Import the second half of a run, with NumPy, the kernels and the model, while the drive reads."""
    from k3.engine.run.generation import generate

    return generate


def _settings(options: dict[str, Any]) -> RunSettings:
    """Return the options as settings. click.UsageError for options that contradict each other."""
    from k3.engine.definition.settings import RunSettings, SamplerOptions

    ids, text = _prompt(options)
    return RunSettings(
        model=model_settings(options),
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
        state=options["state"],
    )


def _prompt(options: dict[str, Any]) -> tuple[tuple[int, ...] | None, str | None]:
    """Return the prompt as ids or as text; without one, two None.

    Only --state and --plan need none. click.UsageError for none, for several, and for an empty one.
    """
    given = [key for key in ("ids", "text", "prompt", "prompt_file") if options[key] is not None]
    names = {"ids": "--ids", "text": "TEXT", "prompt": "--prompt", "prompt_file": "--prompt-file"}
    if not given and (options["state"] is not None or options["plan"]):
        return None, None
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
        encoding = sys.getfilesystemencoding()
        raise click.UsageError(
            f"The prompt ({names[given[0]]}) has bytes that are not {encoding}, this locale's encoding. Give it "
            "through --prompt-file, which is read as UTF-8 in every locale."
        ) from None
    return None, text


def _read_text(path: Path) -> str:
    """Return the text of a file, or of stdin for `-`. click.UsageError when it cannot be read or is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise click.UsageError(f"--prompt-file {path} cannot be read: {error.strerror}.") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--prompt-file {path} is not UTF-8 at byte {error.start}.") from None


def _seed(options: dict[str, Any]) -> int:
    """Return the seed that was given, or a fresh one, which is printed so that the run can be repeated."""
    if options["seed"] is not None:
        return int(options["seed"])
    if options["temperature"] == 0 or options["plan"]:
        return 0
    import secrets

    seed = secrets.randbits(32)
    if not options["as_json"]:
        click.echo(f"seed {seed}", err=True)
    return seed
