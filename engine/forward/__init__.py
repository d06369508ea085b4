"""The forward pass: layers, attention, experts, state, and observers of its steps.

Imports `engine.definition`, not the rooms that launch, run or report.
"""
