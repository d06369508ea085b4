"""The second half of a run: request, session, sampling, output, saved states.

Imports `engine.forward`, `engine.launch` and `engine.definition`.
"""
