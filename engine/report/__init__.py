"""`k3-run --plan` and `k3-run bench`: the cost of a token, predicted and measured.

Sees every other room of the engine.
"""
