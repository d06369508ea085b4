"""Values that define a run: settings, options, vocabulary, sizes of states, the report. Does no I/O.

Imports the rooms below the engine, and no other room of it.
"""
