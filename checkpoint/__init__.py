"""The published model on disk: shards, headers, index, downloads; a `Snapshot` is a `ModelSource`.

Sees `model` and `base`. Reads only.
"""
