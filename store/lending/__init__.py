"""Experts lent inside one process, without a daemon: from files by the native data plane, or from memory.

Sees `store.protocol`, the contract `store.source`, and the rooms below the store.
"""
