"""The workbench without a kernel or a browser."""
