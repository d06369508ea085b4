"""Experts from a daemon: the connection, its ring, and `DaemonSource` and `DaemonModel` over them.

Sees `store.protocol` and the contract `store.source`.
"""
