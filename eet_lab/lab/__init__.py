"""`eet-lab lab`: JupyterLab on the workbench, which opens ready, behind a token, and ends with its launcher."""
