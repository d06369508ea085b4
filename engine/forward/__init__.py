"""The forward pass: layers, attention, experts, state, and observers of its steps.

Sees `engine.launch` and `engine.definition`.
"""
