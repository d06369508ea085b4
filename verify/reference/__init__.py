"""The model once more in plain NumPy, written from the specification: the definition that the engine is held to.

Sees `model` and `base`; nothing of the engine or the kernels.
"""
