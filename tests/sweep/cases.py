"""Commands to be swept, and what must be true after each of their runs, with a fault or without.

A case says which command runs, what its end may claim, and how the next run without a fault is judged. Every
judgement compares with what the same command did undisturbed, never with what the disturbed one said.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import click

from k3.engine.cli import main as run_main
from k3.engine.report.bench_command import bench
from k3.repack.cli import main as repack_main
from k3.repack.root_marks import MARK_NAME
from k3.serve.cli import main as chat_main
from k3.store.cli import main as store_main
from k3.verify.cli import main as verify_main
from tests.support.zygote import Ended, Fault, Zygote

IDS = "1,2,3,5,8"
COMMANDS: dict[str, click.Command] = {
    "k3-repack": repack_main, "k3-verify": verify_main, "k3-run": run_main, "k3-store": store_main,
    "k3-run bench": bench, "k3-chat": chat_main,
}  # fmt: skip


def documented_codes(command: click.Command) -> set[int]:
    """Return the exit codes that a command's --help lists."""
    return {int(number) for number in re.findall(r"^  (\d+)\s", command.epilog or "", re.MULTILINE)}


def problem_of(ended: Ended, allowed: set[int]) -> str | None:
    """Return what no command may do: hang, die of a signal, show a traceback, give an undocumented exit code."""
    if ended.hung:
        return "it hung"
    if "Traceback" in ended.err or "Traceback" in ended.out:
        return f"a traceback, exit {ended.code}"
    if ended.code not in allowed or ended.code == 70:
        return f"exit code {ended.code} is not documented"
    if ended.code not in (0, 130, 141) and not (ended.err + ended.out).strip():
        return f"exit {ended.code} without a word"
    return None


def tree(place: Path) -> dict[str, str]:
    """Return the digest of every file under a directory, by its name in it."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True)
class World:
    """The snapshot and the containers that every case starts from; only to be read."""

    place: Path
    snapshot: Path
    container: Path
    damaged: Path

    @classmethod
    def make(cls, place: Path, snapshot: Path, zygote: Zygote) -> World:
        """Repack the snapshot, and copy the container with one byte of its largest file changed."""
        container, damaged = place / "container", place / "damaged"
        ended = zygote.run(["k3-repack", str(snapshot), str(container), "--no-direct"])
        assert ended.code == 0, ended
        shutil.copytree(container, damaged)
        victim = max((path for path in (damaged / "experts").iterdir()), key=lambda path: path.stat().st_size)
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        return cls(place, snapshot, container, damaged)


class Case:
    """A command that is swept. `name` is for reports."""

    name = ""
    main = ""

    def __init__(self, world: World, zygote: Zygote) -> None:
        self.world = world
        self.zygote = zygote
        self.work = world.place / f"work-{self.name}"

    def command(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Bring the working directory into the state before a run."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def run(self, fault: Fault | None = None) -> Ended:
        """Run the command, with a fault or without."""
        return self.zygote.run(self.command(), fault=fault)

    def judge(self, ended: Ended) -> str | None:
        """Return what is wrong after a run of the command (its claim, or the next run); None when all is well."""
        raise NotImplementedError

    def allowed(self) -> set[int]:
        """Return the exit codes that the command documents, less that of damage where nothing is damaged."""
        return documented_codes(COMMANDS[self.main]) - {1}


class Repack(Case):
    """k3-repack; the next run continues, and the container is the undisturbed one's, with nothing beside it."""

    name, main = "repack", "k3-repack"

    def command(self) -> list[str]:
        return ["k3-repack", str(self.world.snapshot), str(self.work / "c"), "--no-direct", "--verify-full"]

    def judge(self, ended: Ended) -> str | None:
        wanted = tree(self.world.container)
        found = tree(self.work / "c")
        found.pop(MARK_NAME, None)  # a system that says it is not there keeps it, until the next run
        if ended.code == 0 and found != wanted:
            return "exit 0 and another container"
        if "EQUAL" in ended.out and "NOT EQUAL" not in ended.out and found != wanted:
            return "EQUAL is said of another container"
        again = self.zygote.run(self.command())
        if again.code != 0:
            return f"the next run ends with {again.code}: {again.err}"
        if tree(self.work / "c") != wanted:
            return (
                f"the next run makes another container: {sorted(tree(self.work / 'c').items() ^ wanted.items())}"
            )
        return None


class Verify(Case):
    """k3-verify of a sound container: what it says must be so, and no fault may be called damage."""

    name, main = "verify", "k3-verify"

    def target(self) -> Path:
        return self.world.container

    def options(self) -> list[str]:
        return ["--read-data", "all"]

    def command(self) -> list[str]:
        return ["k3-verify", str(self.target()), *self.options()]

    def prepare(self) -> None:
        """Prepare nothing, since a check changes nothing."""

    def judge(self, ended: Ended) -> str | None:
        if ("sound" in ended.out.split(":")[0:1] or "\nsound" in ended.out) and ended.code not in (0, 6, 7, 141):
            return f"sound is said, and exit {ended.code}"
        return None


class VerifySource(Verify):
    """The same against the snapshot."""

    name = "verify-source"

    def options(self) -> list[str]:
        return ["--source", str(self.world.snapshot)]


class VerifyDamaged(Verify):
    """k3-verify of a container with one wrong byte: no fault may make it well."""

    name = "verify-damaged"

    def target(self) -> Path:
        return self.world.damaged

    def allowed(self) -> set[int]:
        return documented_codes(COMMANDS[self.main]) - {0}

    def judge(self, ended: Ended) -> str | None:
        return "sound is said of a damaged container" if "sound:" in ended.out else None


class VerifySourceDamaged(VerifyDamaged):
    """The same against the snapshot."""

    name = "verify-source-damaged"

    def options(self) -> list[str]:
        return ["--source", str(self.world.snapshot)]


class Run(Case):
    """k3-run: exit 0 only with the right tokens, and no wrong token before an error."""

    name, main = "run", "k3-run"
    generate = 3

    def command(self) -> list[str]:
        return ["k3-run", "--container", str(self.world.container), "--ids", IDS, "--ngen", str(self.generate)]

    def judge(self, ended: Ended) -> str | None:
        wanted = self.right()
        said = ended.out.strip()
        if ended.code == 0 and said != wanted:
            return f"exit 0 and tokens {said} instead of {wanted}"
        return None if wanted.startswith(said) else f"tokens {said} instead of {wanted}"

    def right(self) -> str:
        """Return the tokens of an undisturbed run."""
        if not hasattr(self, "_right"):
            ended = self.zygote.run(Run.command(self))
            assert ended.code == 0, ended
            self._right = ended.out.strip()
        return self._right


class RunSnapshot(Run):
    """k3-run from the raw snapshot."""

    name = "run-snapshot"

    def command(self) -> list[str]:
        return ["k3-run", "--snapshot", str(self.world.snapshot), "--ids", IDS, "--ngen", str(self.generate)]


class RunState(Run):
    """k3-run --state: the next run goes on from the old state or the new one, with the same tokens."""

    name = "run-state"

    def command(self) -> list[str]:
        head = ["k3-run", "--container", str(self.world.container), "--ids", IDS]
        return [*head, "--ngen", "0", "--state", str(self.work / "s")]

    def judge(self, ended: Ended) -> str | None:
        if ended.code == 0 and not (self.work / "s").exists():
            return "exit 0 and no state"
        again = self.zygote.run([*Run.command(self), "--state", str(self.work / "s")])
        if again.code != 0:
            return f"the next run ends with {again.code}: {again.err}"
        if again.out.strip() != self.right():
            return f"the next run says {again.out.strip()} instead of {self.right()}"
        left = [path.name for path in self.work.iterdir() if path.name != "s"]
        return f"left over: {left}" if left and ended.code == 0 else None


class RunLogits(Run):
    """k3-run --logits: a file that is there is whole, and after exit 0 it is there."""

    name = "run-logits"

    def command(self) -> list[str]:
        return [*super().command(), "--logits", str(self.work / "l")]

    def judge(self, ended: Ended) -> str | None:
        path = self.work / "l"
        if not hasattr(self, "_logits"):
            assert ended.code == 0, ended
            self._logits = path.read_bytes()
        if ended.code == 0 and not path.exists():
            return "exit 0 and no logits"
        if path.exists() and path.read_bytes() != self._logits:
            return "logits that are not whole"
        return super().judge(ended)


class Serve(Run):
    """k3-store serve, asked by status and used by k3-run --store while calls fail in the daemon, then ended."""

    name, main = "serve", "k3-store"
    generate = 3

    def command(self) -> list[str]:
        place = ["--dirs", str(self.world.container), "--socket", str(self.work / "s")]
        return ["k3-store", "serve", *place, "--cache-gb", "0.002", "--reserve-gb", "0", "--max-clients", "2"]

    def allowed(self) -> set[int]:
        return documented_codes(store_main.commands["serve"]) - {1}

    def run(self, fault: Fault | None = None) -> Ended:
        daemon = self.zygote.spawn(self.command(), fault=fault)
        status = ["k3-store", "status", "--socket", str(self.work / "s")]
        self.asked = self.zygote.run(status)
        while self.asked.code != 0 and self.zygote.lives(daemon):
            self.asked = self.zygote.run(status)
        line = ["k3-run", "--store", str(self.work / "s"), "--ids", IDS, "--ngen", str(self.generate)]
        self.served = self.zygote.run(line)
        self.zygote.kill(daemon, signal.SIGTERM)
        return self.zygote.wait(daemon)

    def judge(self, ended: Ended) -> str | None:
        client = documented_codes(run_main) - {1}
        problem = problem_of(self.served, client) or problem_of(self.asked, client) or super().judge(self.served)
        if problem is not None:
            return f"the client: {problem}: {self.served.err[-2000:]}{self.asked.err[-2000:]}"
        if ended.code == 0 or not (self.work / "s").exists():
            return None
        again = self.run()  # over what the daemon that failed left
        if again.code != 0 or self.served.code != 0:
            return f"the next daemon ends with {again.code}, its client with {self.served.code}: {again.err}"
        return None


class Bench(Case):
    """k3-store bench of the drives: exit 0 only with figures."""

    name, main = "store-bench", "k3-store"

    def command(self) -> list[str]:
        place = ["--dirs", str(self.world.container), "--no-daemon"]
        return ["k3-store", "bench", *place, "--depths", "1", "--seconds", "0.05"]

    def allowed(self) -> set[int]:
        return documented_codes(store_main.commands["bench"]) - {1}

    def judge(self, ended: Ended) -> str | None:
        return "exit 0 and no figures" if ended.code == 0 and "GB/s" not in ended.out else None


class Simulate(Case):
    """k3-store simulate of a routing trace: exit 0 only with the undisturbed table."""

    name, main = "simulate", "k3-store"

    def prepare(self) -> None:
        if not (self.work / "t").exists():
            self.work.mkdir()
            made = self.zygote.run([*Run.command(self), "--route-trace", str(self.work / "t")])  # type: ignore[arg-type]
            assert made.code == 0, made

    generate = 3

    def command(self) -> list[str]:
        return ["k3-store", "simulate", "--trace", str(self.work / "t"), "--cache-gb", "0.001"]

    def allowed(self) -> set[int]:
        return documented_codes(store_main.commands["simulate"]) - {1}

    def judge(self, ended: Ended) -> str | None:
        if not hasattr(self, "_table"):
            self._table = ended.out
        return "exit 0 and another table" if ended.code == 0 and ended.out != self._table else None


class Render(Case):
    """k3-chat render: exit 0 only with the undisturbed prompt."""

    name, main = "chat-render", "k3-chat"

    def prepare(self) -> None:
        self.work.mkdir(exist_ok=True)
        (self.work / "request").write_text(
            json.dumps({"messages": [{"role": "user", "content": "How far is it?"}]})
        )

    def command(self) -> list[str]:
        return ["k3-chat", "render", str(self.work / "request"), "--container", str(self.world.container)]

    def allowed(self) -> set[int]:
        return documented_codes(chat_main.commands[self.command()[1]]) - {1}

    def judge(self, ended: Ended) -> str | None:
        if not hasattr(self, "_right"):
            self._right = ended.out
        return "exit 0 and another answer" if ended.code == 0 and ended.out != self._right else None


class Parse(Render):
    """k3-chat parse: exit 0 only with the undisturbed answer."""

    name = "chat-parse"

    def prepare(self) -> None:
        self.work.mkdir(exist_ok=True)
        (self.work / "completion").write_text("It is near.")

    def command(self) -> list[str]:
        return ["k3-chat", "parse", str(self.work / "completion"), "--no-thinking"]


CASES: tuple[type[Case], ...] = (
    Repack, Verify, VerifySource, VerifyDamaged, VerifySourceDamaged, Run, RunSnapshot, RunState, RunLogits,
    Simulate, Serve, Bench, Render, Parse,
)  # fmt: skip
