"""Holds up same tokens over the product of everything that may not matter, on made-up models of many shapes.

Run with `pytest -m campaign tests/engine/test_same_bits_campaign.py -s`; the seed is in each test's name, and
what was run is printed and counted.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3 import kernels
from k3.base.pages import PAGE_BYTES, page_ceil
from k3.engine.definition.settings import ModelSettings
from k3.engine.forward.model import Model
from k3.engine.launch.model_files import open_model_files
from k3.engine.run.ready import ready_model
from k3.engine.run.session import Session
from k3.model.architecture import LatentType
from k3.model.tensor_recipe import Recipe
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.daemons import daemon_inside
from tests.support.engines import Array

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

SEEDS = range(16)
RUNS = 40
"""Timelines per model, each of one to four legs."""


@dataclass(frozen=True)
class Leg:
    """A stretch of a timeline, run by a model opened for it alone."""

    source: str
    tokens: int
    chunk: int
    threads: int
    variant: str
    cache_bytes: int
    prefetch: int


@dataclass(frozen=True)
class Places:
    """One model in its three forms."""

    snapshot: Path
    home: Path
    drives: tuple[Path, ...]
    socket: Path


@pytest.fixture(autouse=True)
def _machine_restored() -> Iterator[None]:
    threads, variant = kernels.get_threads(), kernels.cpu_variant()
    yield
    kernels.set_threads(threads)
    kernels.set_variant(variant)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_that_may_not_matter_does(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    shape = _shape(dice, seed)
    bits = [dice.choice((4, 8, 8, 16, 32)) for _ in range(3)]
    latent: LatentType = dice.choice(("f32", "f32", "bf16", "f16"))
    numbers = ModelSettings(
        exact=dice.random() < 0.3, keep_share=dice.choice((1.0, 1.0, 0.7)), latent_type=latent, verify="always"
    )  # fmt: skip
    places = _make(shape, bits, dice, tmp_path)
    prompt = [dice.randrange(shape.vocab) for _ in range(dice.choice((5, 33, 70, 130)))]
    count = len(prompt) + 12
    first = Leg("container", count, count, 1, "baseline", 1 << 26, 0)
    counts: Counter[str] = Counter()
    slot_bytes = page_ceil(shape.latent * shape.moe_inter * 51 // 32) + 3 * PAGE_BYTES
    room: dict[str, Any] = {"cache_bytes": 10 * slot_bytes} if dice.random() < 0.5 else {}
    with daemon_inside(places.socket, [places.home, *places.drives], quota=4, max_clients=2, **room):
        ids, wanted = _timeline(places, numbers, bits, [first], prompt, tmp_path / "state", counts)
        assert np.isfinite(wanted).all()
        for number in range(RUNS):
            legs = _legs(dice, count, is_snapshot=dice.random() < 0.25)
            path = tmp_path / f"state{number}"
            found_ids, found = _timeline(places, numbers, bits, legs, prompt, path, counts)
            what = f"{shape}\n{bits} {numbers}\n" + "\n".join(map(str, legs))
            assert found_ids == ids, what
            assert found.tobytes() == wanted.tobytes(), what
            path.unlink(missing_ok=True)
    told = f"bits {bits}, exact {numbers.exact}, keep {numbers.keep_share}, latent {latent}, prompt {len(prompt)}"
    print(f"\nseed {seed}: {told}: {dict(sorted(counts.items()))}")


def _shape(dice: random.Random, seed: int) -> SyntheticModel:
    """Return a model with widths that are no multiples of anything they need not be multiples of."""
    experts = dice.randint(4, 24)
    return SyntheticModel.tiny(
        seed=seed,
        layers=dice.randint(3, 6),
        hidden=dice.choice((96, 128, 160)),
        latent=dice.choice((32, 64, 160)),
        moe_inter=dice.choice((32, 96, 160)),
        experts=experts,
        experts_per_token=dice.randint(1, min(experts, 6)),
        shared_experts=dice.randint(1, 2),
        dense_inter=dice.choice((100, 192, 257)),
        vocab=dice.choice((512, 517, 600)),
        heads=dice.randint(1, 6),
        q_lora=dice.choice((48, 64)),
        kv_lora=dice.choice((40, 64, 96)),
        qk_nope=dice.choice((16, 32)),
        v_head=dice.choice((16, 32, 48)),
        kda_heads=dice.randint(1, 5),
        kda_head=dice.choice((16, 32, 64)),
        res_block=dice.randint(1, 4),
        vision=False,
    )


def _make(shape: SyntheticModel, bits: list[int], dice: random.Random, place: Path) -> Places:
    snapshot = write_snapshot(shape, place / "snapshot")
    drives = tuple(place / name for name in "abc"[: dice.choice((0, 2, 3))])
    request = RepackRequest(
        (snapshot,), place / "home", drives=drives, shares=(1,) * len(drives) or None, recipe=Recipe(*bits),
        direct=False,
    )  # fmt: skip
    repack(request, Watcher())
    return Places(snapshot, place / "home", drives, place / "s")


def _legs(dice: random.Random, count: int, *, is_snapshot: bool) -> list[Leg]:
    """Legs that together take in `count` tokens. A snapshot's states are not a container's."""
    cuts = sorted(dice.sample(range(1, count), dice.randint(0, 3)))
    return [
        Leg(
            source="snapshot" if is_snapshot else dice.choice(("container", "container", "daemon")),
            tokens=stop - start,
            chunk=dice.choice((1, 3, 16, 64)),
            threads=dice.choice((1, 2, 3)),
            variant=dice.choice(kernels.cpu_variants()),
            cache_bytes=dice.choice((0, 200_000, 1 << 26)),
            prefetch=dice.choice((0, 0, 1, 4)),
        )
        for start, stop in zip([0, *cuts], [*cuts, count], strict=True)
    ]


def _timeline(
    places: Places, numbers: ModelSettings, bits: list[int], legs: list[Leg], prompt: list[int], path: Path,
    counts: Counter[str],
) -> tuple[list[int], Array]:  # fmt: skip
    """All ids, those after the prompt chosen greedily, and the logits after each."""
    ids, rows = list(prompt), list[Array]()
    for number, leg in enumerate(legs):
        kernels.set_variant(leg.variant)
        kernels.set_threads(leg.threads)
        with _opened(places, numbers, bits, leg) as model:
            session = Session(model, sum(leg.tokens for leg in legs) + 1, leg.chunk)
            if number:
                assert session.load(path) == ()
            stop = session.position + leg.tokens
            given = ids[session.position : min(stop, len(prompt))]
            if given:
                session.prefill(given, rows.append)
            while session.position < stop:
                if session.position == len(ids):
                    assert session.logits is not None
                    ids.append(int(session.logits.argmax()))
                rows.append(session.step(ids[session.position])[None])
            session.save(path)
        counts["legs"] += 1
        counts["tokens"] += leg.tokens
        settings = {key: value for key, value in asdict(leg).items() if key != "tokens"}
        counts.update(f"{key} {value}" for key, value in settings.items())
    counts["timelines"] += 1
    return ids, np.concatenate(rows)


@contextlib.contextmanager
def _opened(places: Places, numbers: ModelSettings, bits: list[int], leg: Leg) -> Iterator[Model]:
    """Yield the model as `k3-run` opens it."""
    settings = replace(numbers, prefetch=leg.prefetch, threads=leg.threads)
    if leg.source == "daemon":
        settings = replace(settings, store=places.socket)
    elif leg.source == "container":
        roots = (places.home, *places.drives) if places.drives else ()
        settings = replace(settings, container=places.home, roots=roots, expert_bytes=leg.cache_bytes)
    else:
        settings = replace(
            settings, snapshot=(places.snapshot,), expert_bytes=leg.cache_bytes,
            bits=bits[0], mla_bits=bits[1], head_bits=bits[2],
        )  # fmt: skip
    with (
        contextlib.closing(open_model_files(settings)) as opened,
        ready_model(opened, settings, capacity=256, chunk=leg.chunk, every_logit=True) as ready,
    ):
        yield ready.model
