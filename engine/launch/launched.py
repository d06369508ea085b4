"""The first half of every `k3-run`: open the model, refuse what cannot run, begin to load the weights.

All input is validated that needs neither weights nor vocabulary; then the weights load in the background. The
second half (`engine/run/generation.py`) imports NumPy, the kernels and the model while the drive reads. Nothing
here imports them, so that the first read begins as early as it can. Main thread only.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from k3.base.memory_limit import Limit, memory_limit
from k3.base.streams import say
from k3.engine.definition.settings import ModelSettings, RunSettings
from k3.engine.launch.given_prompt import check_given
from k3.engine.launch.loading import check_dense_fits, loading_weights, reduce_limit
from k3.engine.launch.model_files import OpenedModel, open_model_files
from k3.engine.launch.output_paths import check_distinct, check_outside_model
from k3.model.model_source import TensorLoad

VOCABULARY_BYTES = 100_000_000
"""Memory that the vocabulary of the whole model takes, roughly. It is read after the limit was measured."""

IMPORTS_BYTES = 20_000_000
"""Memory that the modules take, roughly, which are imported after the limit was measured."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A model whose files are sound and whose weights are loading, and the memory limit before loading."""

    opened: OpenedModel
    weights: TensorLoad
    limit: Limit


@contextlib.contextmanager
def opened_model(settings: ModelSettings) -> Iterator[OpenedModel]:
    """Open the model that the settings name and print its warnings; close it at the end of the block."""
    with contextlib.closing(open_model_files(settings)) as opened:
        for warning in opened.warnings:
            say(f"warning: {warning}\n")
        yield opened


@contextlib.contextmanager
def launch(settings: RunSettings, import_rest: Callable[[], object]) -> Iterator[Launched]:
    """Open the model and load its weights in the background; close both at the end of the block. Raises K3Error.

    `import_rest` imports the second half of a run. It is called here only where the memory that this takes has to
    be measured.
    """
    check_distinct(settings)
    with opened_model(settings.model) as opened:
        check_outside_model(settings, opened.source)
        check_given(opened, settings)
        limit = _limit(import_rest, with_vocabulary=settings.ids is None)
        check_dense_fits(opened, settings.model, limit)
        with loading_weights(opened, as_json=settings.as_json) as weights:
            yield Launched(opened, weights, limit)


def _limit(import_rest: Callable[[], object], *, with_vocabulary: bool) -> Limit:
    """Return the memory that a run may take, less that of later imports and of a text's vocabulary."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        limit = reduce_limit(memory_limit(), IMPORTS_BYTES)
    else:  # imports take 125 MB of address space, which the limit has to cover
        import_rest()
        limit = memory_limit()
    return reduce_limit(limit, VOCABULARY_BYTES) if with_vocabulary else limit
