"""The model as data: names of experts and tensors, shapes, configuration, vocabulary, identity, and `ModelSource`.

Sees `base`. `model_source.ModelSource` is the contract that snapshots, containers and daemons fulfil.
"""
