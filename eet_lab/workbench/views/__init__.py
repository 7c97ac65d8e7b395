"""What each part of the page shows: its state as plain JSON, and the script and the style that draw it."""
