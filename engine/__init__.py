"""Leases to tokens: the model, its tokenizer and `k3-run`. Begin with model.py."""
