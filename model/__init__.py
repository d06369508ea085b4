"""The model as data: names of experts and tensors, shapes, configuration, vocabulary, identity, and `ModelSource`.

Imports only `base`, and the group size of INT4 from `kernels`. `model_source.ModelSource` is the contract that
snapshots, containers and daemons fulfil.
"""
