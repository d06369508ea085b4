"""Experts from files in this process: slots, flights, reading threads, and `FileSource`.

Sees the contract `store.source`, and the rooms below the store.
"""
