"""Made-up snapshots of any size in the published form, and their command: `python -m k3.verify.synthetic`.

Sees nothing of the product.
"""
