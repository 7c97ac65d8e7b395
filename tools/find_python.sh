#!/bin/sh
# Print a Python that EET Lab is tried with (3.11 to 3.13): the python3 in use if it is one, else a numbered one.
# PYTHON=... chooses another; then 3.11 or newer will do.
if [ -n "${PYTHON:-}" ]; then
    candidates=$PYTHON newest=99
else
    candidates="python3 python3.13 python3.12 python3.11" newest=13
fi
for python in $candidates; do
    if "$python" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
{
    echo "EET Lab needs Python 3.11, 3.12 or 3.13; looked for: $candidates."
    echo "Found: $(python3 --version 2>&1 || echo 'no python3')"
    echo "Install one, for example:  sudo apt-get install -y python3.12 python3.12-venv"
    echo "or name one:               make lab PYTHON=/path/to/python3.12"
} >&2
exit 1
