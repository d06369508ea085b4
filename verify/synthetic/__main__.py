"""The command that writes a snapshot of a made-up K3 model: `python -m k3.verify.synthetic OUT --preset slice`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from k3.verify.synthetic.shape import ExpertOrder, Layout, SyntheticModel
from k3.verify.synthetic.snapshot_writer import write_snapshot, write_sparse_snapshot
from k3.verify.synthetic.tensors import census

_PRESETS: dict[str, Callable[..., SyntheticModel]] = {
    "tiny": SyntheticModel.tiny,
    "slice": SyntheticModel.real_slice,
    "k3": SyntheticModel.k3,
}


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(list(_PRESETS)), default="tiny", show_default=True)
@click.option("--layers", type=int, help="Decoder layers.")
@click.option("--experts", type=int, help="Routed experts per layer.")
@click.option("--experts-per-token", type=int, help="Routed experts that a token visits.")
@click.option("--vocab", type=int, help="Token ids, 256 special ones included.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--expert-order", type=click.Choice(get_args(ExpertOrder)))
@click.option("--shards-per-layer", type=int)
@click.option("--layout", type=click.Choice(get_args(Layout)))
@click.option("--vision/--no-vision", default=None, help="With or without the vision shards.")
@click.option("--flat-config", is_flag=True, default=None, help="No text_config inside config.json.")
@click.option("--also", type=click.Path(file_okay=False, path_type=Path), multiple=True,
              help="A further directory to put shards in, repeatable.")  # fmt: skip
@click.option("--sparse", is_flag=True, help="Holes in place of tensor bytes.")
@click.option("--json", "as_json", is_flag=True, help="Report as one JSON object.")
def main(out: Path, preset: str, also: tuple[Path, ...], sparse: bool, as_json: bool, **changes: Any) -> None:
    """Write a synthetic K3 snapshot into the directory OUT."""
    given = {name: value for name, value in changes.items() if value is not None}
    write = write_sparse_snapshot if sparse else write_snapshot
    try:
        model = _PRESETS[preset](**given)
        snapshot = write(model, out, more_directories=also)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except FileExistsError as error:
        raise click.ClickException(str(error)) from error
    counts = census(model)
    if as_json:
        report = {kind: dataclasses.asdict(count) for kind, count in counts.items()}
        click.echo(json.dumps({"snapshot": str(snapshot), **report}))
        return
    for kind, count in counts.items():
        click.echo(f"{kind:9}{count.tensors:9,} tensors {count.nbytes:19,} bytes")
    click.echo(f"wrote {snapshot}")


if __name__ == "__main__":
    main()
