"""`eet-lab lab`: open JupyterLab on the workbench."""

from __future__ import annotations

import argparse
from pathlib import Path

from eet_lab.commands.command import Command

GUIDE = """\
Opens JupyterLab on the workbench notebook. The server listens on this machine only (127.0.0.1) and asks for a
token.

  eet-lab lab                        notebooks in the current folder (in a clone: copies in eet-lab-results)
  eet-lab lab --dir ~/eet            notebooks in ~/eet; files that are there are kept, never overwritten
  eet-lab lab --notebook 01_pre_padding   another notebook than the workbench
  eet-lab lab --app                  the workbench alone, without code, by Voila
  eet-lab lab --no-browser           print the address only; the default where there is no display
  eet-lab lab --port 9000            another port

On a remote GPU machine, start it there, then on your own computer run the `ssh -L ...` line that it prints
and open the address in your browser. Press Ctrl+C here to stop.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the notebooks go (default: here)")
    parser.add_argument("--port", type=int, metavar="N", help="port (default: the first free from 8888)")
    parser.add_argument("--notebook", default="workbench.ipynb", metavar="NAME", help="which one to open")
    parser.add_argument("--app", action="store_true", help="show the page without its code, by Voila")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser; print the address")


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; the server's exit code."""
    from eet_lab.lab.notebooks import notebook_name, prepare, working_copy
    from eet_lab.lab.serve import serve
    from eet_lab.lab.server import choose_port

    choose_port(args.port)  # before anything is copied
    name = notebook_name(args.notebook, args.dir)
    root, notebooks = prepare(args.dir)
    notebook = notebooks / name if args.app or args.dir else working_copy(root, notebooks / name)
    return serve(root, notebook, args.port, browser=not args.no_browser, app=args.app)


COMMAND = Command("lab", "open JupyterLab on the workbench", GUIDE, add_arguments, run)
