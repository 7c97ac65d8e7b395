"""Tests that launch kernels; a package, so that its conftest has a name of its own."""
