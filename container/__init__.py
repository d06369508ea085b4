"""The container format: layout, manifest, catalog, dense blob; a `Container` is a `ModelSource`.

Sees `checkpoint`, `model` and `base`. The format is specified in docs/container.md.
"""
