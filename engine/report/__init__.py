"""Reports: `k3-run --plan` predicts the cost of a token, `k3-run bench` measures it.

Imports every other room of the engine.
"""
