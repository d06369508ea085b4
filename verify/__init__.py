"""Proof of a container, grade by grade: structure, bytes, source; with a reference model and made-up snapshots.

May see every other room but serve. Uses the repacker's plan and comparison, and none of the engine's arithmetic.
"""
