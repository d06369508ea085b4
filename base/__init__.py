"""Tools that know nothing of K3: errors, files, direct I/O, buffers, digests, command lines.

Imports no other room.
"""
