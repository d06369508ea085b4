"""A run as values: settings, options, vocabulary, sizes of states, the report. No I/O, no NumPy.

Sees the rooms below the engine.
"""
