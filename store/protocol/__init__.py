"""The agreement of daemon and client: messages, the ring, the model description, the socket, the native plane.

Sees the contract `store.source`, and the rooms below the store. Specified in docs/store_protocol.md.
"""
