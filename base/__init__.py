"""Tools that know nothing of K3: errors, files, direct reads, buffers, digests, command lines.

Sees no other room.
"""
