"""The second half of a run: request, session, sampling, output, saved states.

Sees `engine.forward`, `engine.launch` and `engine.definition`.
"""
