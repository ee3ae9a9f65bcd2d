"""From an open checkpoint to what a caller wants of it."""
