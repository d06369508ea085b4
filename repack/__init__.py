"""From a snapshot to a container: plan, streaming, journal, publication, and the comparison with the source.

Writes the format that `container` reads. Sees container, checkpoint, model, kernels and base; neither the store
nor the engine.
"""
