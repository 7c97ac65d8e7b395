"""Prefill, decode, generate: the plain parts, better ones beside them, and the Engine that runs them."""
