"""Routing traces, and cache policies replayed on them.

Sees the native policies and the rooms below the store.
"""
