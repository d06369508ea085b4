"""The first half of a run: open and check the model, plan its memory, begin to load its weights.

Imports `engine.definition`, and neither NumPy nor the kernels, so that the first read begins early.
"""
