"""The model's chat format: a conversation as segments to encode, and a completion as reasoning, content and calls.

`docs/chat.md` defines the format. No I/O; sees `definition` and the rooms below the engine.
"""
