"""The engine: it runs the model over leases of experts and prints tokens (`k3-run`).

Begin with `forward/model.py`. The rooms, and what each may import, are in docs/architecture.md.
"""
