"""The container format: layout, manifest, catalog, dense blob. A `Container` is a `ModelSource`.

Imports `checkpoint`, `model` and `base`. The format is specified in docs/container.md.
"""
