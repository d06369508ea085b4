"""The published model on disk: shards, headers, index, downloads. A `Snapshot` is a `ModelSource`.

Imports `model`, `kernels` and `base`. Only reads.
"""
