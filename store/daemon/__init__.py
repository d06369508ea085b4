"""The daemon: control loop, listener, the model it serves, limits, metrics, systemd.

Sees `store.protocol`, `store.lending` and the contract `store.source`.
"""
