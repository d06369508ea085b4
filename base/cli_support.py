"""Exit, error reports and progress: the parts that every command shares.

A command's body runs inside `run()`. An operating error becomes one line on stderr (one JSON object with --json)
and an exit code of `errors.ExitCode`; Ctrl-C becomes 130; a closed pipe is quiet. A bug shows its traceback and
becomes 70, since Python's own 1 means damaged bytes here. `Progress` shows bytes, rate and ETA through tqdm, or as
JSON lines on stdout. Used from a command's main thread.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from k3.base import streams
from k3.base.direct_io import drive_error
from k3.base.errno_advice import Operation
from k3.base.errors import EXIT_CODE_HELP, ExitCode, K3Error, UnsupportedError
from k3.base.notes import take_notes
from k3.base.safe_text import visible, visible_text

if TYPE_CHECKING:
    from tqdm import tqdm

_Command = TypeVar("_Command", bound=Callable[..., Any])

# NumPy's OpenBLAS would start a thread and reserve memory for each processor, and nothing here multiplies with it.
# Where it gets neither (ulimit -v, -u) it ends the process with 1, which means damage here, or by SIGINT.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_JSON_INTERVAL_S = 1.0

_ANY_COMMAND = (
    ExitCode.OK, ExitCode.USAGE, ExitCode.DRIVE, ExitCode.SPACE, ExitCode.UNSUPPORTED, ExitCode.INTERNAL,
    ExitCode.INTERRUPTED, ExitCode.CLOSED_PIPE,
)  # fmt: skip


def format_size(nbytes: float) -> str:
    """Return a size in powers of 1000 for people: "812 B", "5.1 MB", "1.45 TB"."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def exit_code_help(codes: Iterable[ExitCode]) -> str:
    """Return the paragraph of --help that explains `codes` and the exit codes of every command."""
    listed = sorted({*codes, *_ANY_COMMAND})
    lines = [f"  {int(code):<4}{EXIT_CODE_HELP[code]}" for code in listed]
    return "\b\nExit codes:\n" + "\n".join(lines)


class Command(click.Command):
    """A click command that always ends with one of the project's exit codes, even before `run` is entered.

    By itself click exits with 1, which means damage here, on Ctrl-C at a prompt or when the reader of `--help`
    closes the pipe.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse and run; see click.Command."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        parse = super().main
        return _end(lambda: parse(args, prog_name, complete_var, standalone_mode=False, **extra))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments; see click.Command."""
        with _hidden_from_click():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command's function; see click.Command."""
        with _hidden_from_click():
            return super().invoke(ctx)


class Group(Command, click.Group):
    """A group whose commands all end as `Command` does."""


class _UncaughtError(Exception):
    """An exception on its way through click, which would turn it into exit code 1."""

    def __init__(self, error: OSError | KeyboardInterrupt) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _hidden_from_click() -> Iterator[None]:
    try:
        yield
    except (OSError, KeyboardInterrupt) as error:
        raise _UncaughtError(error) from error


def _end(body: Callable[[], Any]) -> NoReturn:
    """Run click's part of a command and exit with its code."""

    def parse() -> int:
        streams.prepare()
        return _parsed(body)

    try:
        code = _outcome(parse, as_json=False, on_interrupt=None)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ExitCode.USAGE)
    except BrokenPipeError:
        code = int(ExitCode.CLOSED_PIPE)
    streams.settle()
    raise SystemExit(code)


def _parsed(body: Callable[[], Any]) -> int:
    """Return the exit code of parsing; a body that is reached exits by itself, in `run`."""
    try:
        result = body()
        return result if isinstance(result, int) else 0  # click's own Exit, after --help
    except _UncaughtError as hidden:
        if isinstance(hidden.error, OSError):
            raise hidden.error from None
        raise KeyboardInterrupt from None
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        streams.say(shown.getvalue())
        return int(ExitCode.USAGE)  # click's own code for a file that it cannot open is 1


def version_option(format_version: int) -> Callable[[_Command], _Command]:
    """Return the option `--version`, which prints the versions of the package and of the container format."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            from importlib.metadata import version  # takes longer than all of --help

            click.echo(
                f"{context.find_root().info_name} {version('k3-store')} (container format {format_version})"
            )
            context.exit()

    return click.option(
        "--version",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show the version and exit.",
    )


def echo(text: str, *, err: bool = False) -> None:
    """Print lines for people, on stderr with `err`. Control characters are escaped."""
    click.echo(visible_text(text), err=err)


def emit_json(message_type: str, **fields: Any) -> None:
    """Write one JSON object as a line on stdout, in ASCII: file names need not be valid UTF-8."""
    sys.stdout.write(json.dumps({"type": message_type, **fields}) + "\n")
    sys.stdout.flush()


def run(body: Callable[[], int | None], *, as_json: bool = False, on_interrupt: str | None = None) -> NoReturn:
    """Run a command's body and exit the process.

    `body` returns an exit code, or None for 0. `on_interrupt` is one sentence on what Ctrl-C leaves behind.
    """
    streams.prepare()
    try:
        code = _outcome(body, as_json, on_interrupt)
        _print_notes(as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        code = int(ExitCode.CLOSED_PIPE)  # the reader of our output closed it: no one to report to
    except OSError as error:
        refused = _system_error(error)
        report_error(refused, as_json=as_json)
        code = int(refused.exit_code)
    streams.settle()
    raise SystemExit(code)


def _print_notes(as_json: bool) -> None:
    for text in take_notes():
        streams.say(json.dumps({"type": "note", "text": text}) + "\n" if as_json else f"note: {text}\n")


def _system_error(error: OSError) -> K3Error:
    """Return a typed error for an OSError that no room has typed; without a file name it is mostly stdout's."""
    if error.filename is not None:
        name = error.filename
        path = Path(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) else Path(str(name))
        return drive_error("the system refused", error, path)
    found = drive_error("the system refused a write", error, None, operation=Operation.WRITE)
    found.advice = "If it was standard output, redirect it elsewhere; what the command had made by then stays"
    return found


def _outcome(body: Callable[[], int | None], as_json: bool, on_interrupt: str | None) -> int:
    """Return the exit code of a body, after reporting its error if it raised one."""
    try:
        return body() or 0
    except K3Error as error:
        report_error(error, as_json=as_json)
        return int(error.exit_code)
    except KeyboardInterrupt:
        text = "interrupted" + (f": {on_interrupt}" if on_interrupt else "")
        if as_json:
            streams.say(json.dumps({"type": "error", "error": "Interrupted", "problem": text}) + "\n")
        else:
            streams.say(f"\n{text}\n")
        return int(ExitCode.INTERRUPTED)
    except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except OSError as error:  # not typed by any room
        refused = _system_error(error)
        report_error(refused, as_json=as_json)
        return int(refused.exit_code)
    except Exception as error:
        exhausted = _exhausted(error)
        if exhausted is not None:
            report_error(exhausted, as_json=as_json)
            return int(exhausted.exit_code)
        # A bug: show its traceback, and do not exit with 1, which means damaged bytes.
        streams.say(traceback.format_exc())
        return int(ExitCode.INTERNAL)


def _exhausted(error: Exception) -> K3Error | None:
    """Return the error for exhausted memory or threads or a loop of links, which are no OSError in Python."""
    if isinstance(error, MemoryError):
        advice = "Raise the limit (ulimit -v, the cgroup's), or let the command need less"
        return UnsupportedError("the system gave no more memory", advice=advice)
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # Python has no type for it
        advice = "Raise the limit (ulimit -u and -v, the cgroup's pids.max)"
        return UnsupportedError("the system gave no more threads", advice=advice)
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # of Path.resolve
        loop = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return drive_error(str(error), loop, None, operation=Operation.LOOK)
    return None


def report_error(error: K3Error, *, as_json: bool) -> None:
    """Print an operating error on stderr, as one line or as one JSON object."""
    message = {"type": "error", **error.as_dict()}
    line = json.dumps(message) if as_json else f"error: {error}"
    streams.say(line + "\n")


class Progress:
    """Bytes done of a known total, with rate, ETA and the current item.

    On a terminal it is a tqdm bar on stderr, with `as_json` a line a second on stdout, otherwise nothing. Calls of
    `advance` from several threads need the caller's lock.
    """

    def __init__(self, what: str, total_bytes: int, *, as_json: bool = False, quiet: bool = False) -> None:
        self.what = what
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._as_json = as_json
        self._item = ""
        self._start = self._last = time.monotonic()
        self._shows_bar = not as_json and not quiet and sys.stderr.isatty()
        self._made_bar: tqdm[Any] | None = None

    def item(self, name: str) -> None:
        """Set the name of the current item, usually a shard."""
        self._item = name
        if bar := self._bar():
            bar.set_postfix_str(visible(name), refresh=False)

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes done."""
        self.done_bytes += nbytes
        if bar := self._bar():
            bar.update(nbytes)
        if self._as_json and time.monotonic() - self._last >= _JSON_INTERVAL_S:
            self._line()

    def _bar(self) -> tqdm[Any] | None:
        """Return the bar, None if none is shown.

        It is made at the first progress: importing tqdm takes longer than the rest of a command's --help.
        """
        if self._shows_bar and self._made_bar is None:
            from tqdm import tqdm

            self._made_bar = tqdm(
                total=self.total_bytes, desc=self.what, unit="B", unit_scale=True, dynamic_ncols=True,
                file=sys.stderr, leave=False,
            )  # fmt: skip
            began_s = time.time() - (time.monotonic() - self._start)  # so that the rate counts from the start
            self._made_bar.start_t = self._made_bar.last_print_t = began_s
        return self._made_bar

    def _line(self) -> None:
        self._last = time.monotonic()
        elapsed_s = max(1e-9, self._last - self._start)
        rate = self.done_bytes / elapsed_s
        left_bytes = max(0, self.total_bytes - self.done_bytes)
        emit_json(
            "progress", what=self.what, item=self._item, done_bytes=self.done_bytes,
            total_bytes=self.total_bytes, gb_per_s=round(rate / 1e9, 3),
            eta_s=round(left_bytes / rate, 1) if rate > 0 else None,
        )  # fmt: skip

    def close(self) -> None:
        """Remove the bar; with `as_json` write a last line with the final count."""
        self._shows_bar = False
        if self._made_bar is not None:
            self._made_bar.close()
            self._made_bar = None
        if self._as_json:
            self._line()
            self._as_json = False
