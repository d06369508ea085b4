"""The command `k3-run bench`: parse options and call. NumPy and the model are imported inside the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from k3.base import cli_support
from k3.base.errors import ExitCode
from k3.base.option_types import Whole
from k3.engine.launch.options import engine_options, model_options, model_settings
from k3.engine.launch.run_option_types import Counts

if TYPE_CHECKING:
    from k3.engine.report.bench_run import BenchSettings

DEFAULT_PROMPT = (32,)
DEFAULT_GENERATE = (16,)
DEFAULT_CHUNK = (64,)

_EXIT_CODES = (
    ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.SOURCE, ExitCode.INCOMPLETE,
    ExitCode.NOT_A_CONTAINER, ExitCode.DRIVE, ExitCode.UNSUPPORTED, ExitCode.DAEMON,
    ExitCode.INTERRUPTED,
)  # fmt: skip


@click.command(
    cls=cli_support.Command,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    epilog=cli_support.exit_code_help(_EXIT_CODES),
)
@model_options
@click.option(
    "-p", "--n-prompt", type=Counts(0), default=DEFAULT_PROMPT, help="Prompt lengths to measure; 0 for none."
)
@click.option(
    "-n", "--n-gen", type=Counts(0), default=DEFAULT_GENERATE, help="Generation lengths to measure; 0 for none."
)
@click.option(
    "-d", "--n-depth", type=Counts(0), default=(0,), help="Tokens in the context before those that are measured."
)
@click.option(
    "-b",
    "--chunk",
    type=Counts(1),
    default=DEFAULT_CHUNK,
    show_envvar=True,
    envvar="K3_CHUNK",
    help="Prompt tokens per pass (n_batch in the table).",
)
@click.option("-r", "--repetitions", type=Whole(1), default=5, help="Times that each test is measured.")
@click.option(
    "--no-warmup", is_flag=True, help="Leave out the first repetition of each test, which is not counted."
)
@click.option("--seed", type=Whole(0), default=0, help="Seed of the random token ids.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["md", "json", "csv"]),
    default="md",
    help="Format of the result on stdout.",
)
@engine_options
def bench(**options: Any) -> None:
    """Measure how fast prompts are taken in (pp) and tokens are generated (tg).

    Prints llama-bench's columns and, beside each rate, its share of what the machine can do: of the rate at which
    memory is read, and of the drives' rate, both measured in the same run. Sampling and text are not measured.
    Lists are comma-separated, and each combination is one test.
    """
    settings = _settings(options)

    def body() -> None:
        from k3.engine.report.bench_run import run_bench

        run_bench(settings)

    cli_support.run(body, as_json=settings.form == "json", on_interrupt="the results so far are above")


def _settings(options: dict[str, Any]) -> BenchSettings:
    """Return the options as settings."""
    from k3.engine.report.bench_run import BenchSettings

    return BenchSettings(
        model=model_settings(options),
        prompts=options["n_prompt"],
        gens=options["n_gen"],
        depths=options["n_depth"],
        chunks=options["chunk"],
        repetitions=options["repetitions"],
        warm_up=not options["no_warmup"],
        seed=options["seed"],
        form=options["output"],
    )
