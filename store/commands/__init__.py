"""The bodies of `k3-store bench` and `k3-store warm`.

Sees every other room of the store.
"""
