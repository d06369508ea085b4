"""The first half of a run: open and check the model, plan its memory, begin to load its weights.

Sees `engine.definition`. Imports no NumPy and no kernels, so that the first read begins early.
"""
